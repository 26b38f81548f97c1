"""The sentences of docs/results.md that interpret figures: written by hand, to be read again whenever results change.

Everything else on the page is computed. An empty text is left out.
"""

INTRODUCTION = """# Results

<!-- written by benchmarks/results_page.py from results/; edit that, not this -->

The paper's claims, measured again. **This is a beginning, not the whole of it**: one small encoder, and of the
planned runs those that the time on a GPU allowed. What is missing is listed [at the end](#not-measured-yet). Every
number is computed from the `result.json` files in `results/`; `python benchmarks/results_page.py` writes this page.

The encoder is a raw masked language model of BERT-small's shape (4 layers, hidden 512, 28.8M parameters, trained on
Wikipedia and novels only), so nothing here has seen labelled data before. Three epochs, batch 32, AdamW, one learning
rate for all methods, TF32, captured steps, final weights (no choice of the best epoch), one NVIDIA H200, about commit
44392b5; the section on the weights has models of its own. Intervals are 95% bootstrap intervals of the mean; tests are
exact paired permutation tests over seeds.
"""

RISK_READING = """### What this says

- **The weights of Eq. 5 carry no information that ten seeds could show.** delta-SAM and delta-SAM with its weights
  shuffled differ neither in adversarial risk nor in accuracy beyond chance (the intervals above bound what could have
  been missed). Where delta-SAM differs from SAM, shuffled weights differ from SAM in the same direction: unequal
  weights do it, not the weights of the right instances. One task, one model, one radius.
- **Sharpness-aware training lowers the adversarial risk**, by more than half, as the paper says. The order of SAM and
  delta-SAM is the other way round here: SAM's risk is the lower one.
- **At rho = 0.05 no method is as accurate as plain training on this model**, unlike in the paper. The radius is too
  large for it in three epochs: tuned on training data, the sharpness-aware methods take the smallest or second
  smallest radius of their grids (below).
- **Exact per-instance perturbation wants a smaller radius than SAM**: of 0.005, 0.01 and 0.02 it takes 0.005 on all
  four tasks, and at 0.01 it learns nothing of CoLA, where SAM still does.
"""

GLUE_READING = ""

STS_READING = ""

SUMMARIZATION_READING = ""

TIMES_READING = ""

CONCLUSION = ""
"""A section of its own at the beginning: what the paper claims and what was found, side by side."""

MISSING = """\
- The weights: later than one epoch, models trained with SAM (both are in `configs/sweeps/evidence/weights.yaml`),
  other tasks, seeds and models, larger radii of the probes, several draws.
- Larger encoders: BERT-base and RoBERTa-large, the paper's own, on any task."""
"""What is missing beside the sweeps, whose missing runs are counted."""
