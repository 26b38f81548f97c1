"""The sentences of docs/results.md that interpret figures: written by hand, to be read again whenever results change.

Everything else on the page is computed. An empty text is left out.
"""

INTRODUCTION = """# Results

<!-- written by benchmarks/results_page.py from results/; edit that, not this -->

The paper's claims, measured again on one small encoder. Of the planned runs these are the ones that the time on a GPU
allowed; what is missing is listed [at the end](#not-measured-yet). Every number is computed from the `result.json`
files in `results/`, which name the commit that made them; `python benchmarks/results_page.py` writes this page.

The encoder is a raw masked language model of BERT-small's shape (4 layers, hidden 512, 28.8M parameters, trained on
Wikipedia and novels only), so nothing here has seen labelled data before. Where nothing else is said: three epochs,
batch 32, AdamW, one learning rate for all methods, TF32, captured steps, final weights (no choice of the best epoch),
one NVIDIA H200. Intervals are 95% bootstrap intervals of the mean; tests are exact paired permutation tests over
seeds.
"""

CONCLUSION = """## In short

| the paper | here |
|---|---|
| Sharpness-aware training lowers the adversarial risk. | Yes, by more than half on MRPC and RTE, for every variant. |
| Exact per-instance perturbation lowers it most, delta-SAM comes between it and SAM. | Exact is lowest. delta-SAM is \
not between: its risk is above SAM's on both tasks, by 0.04 to 0.09. |
| The weights of Eq. 5 find the instances whose gradient changes fastest. | Hardly. In float32 they are mostly \
rounding; without rounding one random direction says little of what another says until late in training, and nothing \
of what the theory asks for; shuffled within the batch they do as well. |
| delta-SAM is more accurate than SAM on GLUE. | Not on MRPC and RTE, where ten seeds cannot tell them apart, nor on \
STS-B. On CoLA it is, by 3.0 [1.4, 4.3] in five seeds; whether its weights do it was not tested there. |
| delta-SAM is better than SAM for self-supervised STS. | Yes, by 0.30 [0.22, 0.40] in the average of seven sets, \
in all five seeds. Whether the weights do it was not tested (no shuffled control there). |
| Exact per-instance perturbation is unaffordable. | It costs what SAM costs: 0.95 to 1.08 times, captured, up to 128 \
tokens; 1.25 times at 512 ([Speed](speed.md)). |

**Which to take?** At their own radii the sharpness-aware methods are within 1.5 points of plain training on MRPC, RTE
and STS-B, mostly above it. SAM at rho = 0.01 to 0.02 is the safe choice. Exact per-instance perturbation at
rho = 0.005 has the highest mean of the three on MRPC (0.5 [0.15, 0.93] above plain training, ten seeds) and on STS-B
at SAM's price, and the lowest on CoLA, where even the smallest radius of its grid may have been too large. delta-SAM's
two extra forwards (1.2 to 1.4 times SAM, captured) bought something on CoLA and in contrastive learning, and nothing
elsewhere. The radius matters more than the method: at 0.05, SAM loses five points on MRPC and exact per-instance
perturbation eleven.
"""

RISK_READING = """### What this says

- **The weights of Eq. 5 carry no information that ten seeds could show.** On MRPC delta-SAM and delta-SAM with its
  weights shuffled differ neither in adversarial risk nor in accuracy beyond chance (the intervals above bound what
  could have been missed); three seeds of RTE agree. Where delta-SAM differs from SAM, shuffled weights differ from SAM
  in the same direction: unequal weights do it, not the weights of the right instances. Rounding is not the reason:
  with exact derivatives along the same directions (*directional weights*) risk and accuracy are the same, to 0.01 and
  to less than a point. Weights along each instance's own gradient, which do measure something (below), are further
  from SAM, not nearer to the exact perturbation.
- **Sharpness-aware training lowers the adversarial risk**, by more than half, as the paper says, and the exact
  perturbation per instance lowers it most. The order of SAM and delta-SAM is the other way round here: SAM's risk is
  the lower one, on both tasks.
- **At rho = 0.05 no method is as accurate as plain training on MRPC**, unlike in the paper. The radius is too large
  for this model in three epochs, for the exact perturbation far too large: 70.2 is little more than the larger class
  (68.4), and twice the epochs make it 72.7, not the best of all as in the paper. On RTE plain training itself is
  little better than the larger class (52.7), and the accuracies say nothing.
- **Exact per-instance perturbation wants a smaller radius than SAM.** At 0.01 it has 79.9 on MRPC; of 0.005, 0.01 and
  0.02 it takes 0.005 on all four tasks (below), and at 0.01 it learns nothing of CoLA, where SAM still does. Its
  default radius is 0.005 since.
"""

GLUE_READING = """### What GLUE says

Tuned on training data, the sharpness-aware methods are about as good as plain training or a little better. With ten
seeds SAM is 1.5 [0.5, 2.4] above it on RTE, exact per-instance perturbation 0.5 [0.15, 0.93] on MRPC and
1.1 [0.2, 2.3] on RTE; on STS-B both are by a few tenths, with five. None of that survives the correction for up to
seven comparisons a task, nor does R-Drop, which perturbs nothing and does as well as any of them (p = 0.055 on MRPC).
delta-SAM cannot be told from SAM on MRPC, RTE and STS-B.

CoLA is another story, in five seeds that scatter by several points: delta-SAM is 3.0 [1.4, 4.3] above SAM and
6.7 [5.6, 7.6] above exact per-instance perturbation, and R-Drop 4.7 [2.9, 9.1] above plain training. Exact
per-instance perturbation is the worst there; it took 0.005, the smallest radius it was offered. delta-SAM with its
weights shuffled was not run on CoLA, so what the weights contribute is open.
"""

SECOND_ENCODER_READING = """### What it says

TODO
"""

STS_READING = """### What this says

Mirror-BERT's fifty updates lift the encoder by nine points. delta-SAM adds a quarter of a point, in the same direction
in all five seeds, and is 0.30 above SAM; on STS-B it is more than a point. The paper has 0.87 and 0.22 for the
averages. SAM and delta-SAM took the largest radius of the grid, so a larger one may do better yet. Random noise of
the paper's scale costs this encoder 2.7 points, where the paper gains 0.4: it was not tuned. delta-SAM with its
weights shuffled was not run here, so what the weights contribute is open.
"""

SUMMARIZATION_READING = """Three runs show that the path works end to end, and that 150 updates make summaries
of titles (19 to 32 ROUGE-1); they do not compare methods.
"""

TIMES_READING = """One epoch of MRPC, so loading and recording weigh more than in a longer training. delta-SAM pays for
probes in full float32 here (three forwards beside TF32 ones). The other tasks were not timed.
"""

MISSING = """\
- The weights: other tasks, seeds and models; larger probes, several draws and more rows on more than one model
  (`python benchmarks/weights_run.py --device cuda` makes all of them), and the cosines there.
- Other encoders: all-MiniLM-L6-v2, which can be had from the package registry, and the paper's own, BERT-base and
  RoBERTa-large, on any task."""
"""What is missing beside the sweeps, whose missing runs are counted."""
