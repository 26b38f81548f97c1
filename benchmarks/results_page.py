"""Writes docs/results.md from the runs in results/: what was measured again, beside the paper's figures.

Reads result.json files alone, needs no torch:

    python benchmarks/results_page.py
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

from deltasam.report import (
    Comparison,
    Run,
    by_cell,
    holm,
    method_name,
    method_order,
    paired_test,
    paper,
    read_runs,
    summarize,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "results"
MODEL = "bert-small-wiki"
weights = runpy.run_path(str(ROOT / "benchmarks" / "results_weights.py"))
table, with_interval = weights["table"], weights["with_interval"]
TASKS = {"mrpc": "MRPC", "rte": "RTE", "stsb": "STS-B", "cola": "CoLA", "qnli": "QNLI", "mnli": "MNLI", "qqp": "QQP",
         "sst2": "SST-2"}  # fmt: skip

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

RISK = """The paper's Table 4 with one radius for all, rho = 0.05, and a control: *weights shuffled* is delta-SAM with
its own weights g dealt out to the instances of the batch at random. It has the same distribution of weights, the same
cost, and no information."""

TUNING = """Mean of two seeds on the last tenth of the training set, trained on the rest. Bold: chosen. MRPC, RTE:
accuracy; STS-B: Pearson; CoLA: Matthews."""

FREELB = """FreeLB at its default step sizes stays near the larger class of MRPC (68.4) on this encoder; they were not
tuned."""

MISSING = """## Not measured yet

- Adversarial risk: exact per-instance perturbation (also with twice the epochs and smaller radii), the weightings
  `Directional` and `OwnGradient`, and RTE: the sweep `configs/sweeps/evidence/adversarial-risk.yaml` holds them.
- GLUE: the final runs of SAM, delta-SAM and per-instance at the chosen radius, of STS-B and CoLA with any method, the
  larger tasks, ten seeds (`configs/sweeps/evidence/glue.yaml`).
- The weights: later than one epoch, models trained with SAM (both are in `configs/sweeps/evidence/weights.yaml`),
  other tasks, seeds and models, larger radii of the probes, several draws.
- Self-supervised STS (`configs/sweeps/evidence/sts.yaml`), summarization, running times of undisturbed runs (these
  runs shared the GPU, so their times say nothing).

Each goes on where it stopped: `deltasam sweep configs/sweeps/evidence/glue.yaml --output results/glue` makes the runs
that are missing.
"""


def primary(run: Run) -> float:
    """The primary metric in points."""
    return 100 * run.metrics[run.primary]


def risk_of(run: Run) -> float:
    """The adversarial risk, nan where it was not measured."""
    found = run.risk()
    return float("nan") if found is None else float(found["value"])


def risk_section() -> str:
    """Table 4: risk and accuracy, and what the weights contribute."""
    cells = by_cell(read_runs(RESULTS / "adversarial-risk").finished)
    parts = [
        "## Adversarial risk, and what the weights contribute",
        RISK,
        "    deltasam sweep configs/sweeps/evidence/adversarial-risk.yaml --output results/adversarial-risk",
    ]
    for task in [name for name in TASKS if any(key[0] == name for key in cells)]:
        ours = {method: found for (at, model, method), found in cells.items() if at == task and model == MODEL}
        parts += [f"### {TASKS[task]}, development set", risk_table(task, ours), risk_tests(task, ours)]
    return "\n\n".join(parts)


def risk_table(task: str, ours: dict[str, list[Run]]) -> str:
    """One row per method; the paper's figures are those of BERT-base."""
    rows = []
    theirs = paper.ADVERSARIAL_RISK.figures["BERT-base"]
    for method in sorted(ours, key=method_order):
        runs = ours[method]
        scores = [primary(run) for run in runs]
        paper_risk = theirs.get(method, {}).get(f"{task} risk")
        middle, best = (theirs.get(method, {}).get(f"{task} {what}") for what in ("median", "max"))
        known = "-" if paper_risk is None else f"{paper_risk:.2f}; {middle} / {best}"
        rows.append([
            method_name(method), str(len(runs)), with_interval(map(risk_of, runs), 2), with_interval(scores, 1),
            f"{summarize(scores).median:.1f} / {max(scores):.1f}", f"{max(scores[:5]):.1f}", known,
        ])  # fmt: skip
    head = ["method", "seeds", "L_adv", "accuracy", "median / max", "best of 5 seeds", "paper: L_adv; median / max"]
    return table(head, rows)


def risk_tests(task: str, ours: dict[str, list[Run]]) -> str:
    """Paired comparisons over the seeds that two methods share."""
    shuffled = "DeltaSAM(RandomWeights)"
    pairs = [("SAM", "ERM"), ("DeltaSAM", "ERM"), ("DeltaSAM", "SAM"), ("DeltaSAM", shuffled), (shuffled, "SAM")]
    pairs += [("PerInstanceSAM", other) for other in ("ERM", "SAM", "DeltaSAM")]
    present = [(a, b) for a, b in pairs if a in ours and b in ours]
    measures: tuple[Callable[[Run], float], ...] = (risk_of, primary)
    found = [[compared(ours[a], ours[b], measure) for measure in measures] for a, b in present]
    adjusted = iter(holm([comparison.p for each in found for comparison, _ in each]))
    rows = []
    for (a, b), each in zip(present, found, strict=True):
        cells = [f"{interval} (p = {next(adjusted):.2g})" for _, interval in each]
        rows.append([f"{method_name(a)} - {method_name(b)}", str(each[0][0].pairs), *cells])
    return table(["difference", "pairs", "L_adv", "accuracy, points"], rows) + "\n\np after Holm's correction."


def compared(first: list[Run], second: list[Run], measure: Callable[[Run], float]) -> tuple[Comparison, str]:
    """The paired test over common seeds, and the mean difference with its interval."""
    ours, theirs = ({run.seed: measure(run) for run in runs} for runs in (first, second))
    seeds = sorted(set(ours) & set(theirs))
    difference = with_interval([ours[seed] - theirs[seed] for seed in seeds], 2)
    return paired_test([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]), difference


READING = """### What this says

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


def tuning_section() -> str:
    """The grids: means over the tuning seeds, on the last tenth of the training set."""
    runs = [run for run in read_runs(RESULTS / "glue").finished if run.split.endswith("]")]
    parts = [
        "## The radius, chosen on training data",
        TUNING,
        "    deltasam sweep configs/sweeps/evidence/glue.yaml --output results/glue",
    ]
    methods = sorted({run.method for run in runs}, key=method_order)
    tasks = [task for task in TASKS if any(run.task == task for run in runs)]
    rows = []
    for method in methods:
        radii = sorted({dict(run.settings)["rho"] for run in runs if run.method == method})
        means = {
            (task, rho): _mean([r for r in runs if (r.task, r.method, dict(r.settings)["rho"]) == (task, method, rho)])
            for task in tasks
            for rho in radii
        }
        best = {task: max(radii, key=lambda rho, task=task: means[task, rho]) for task in tasks}
        for rho in radii:
            cells = [f"**{means[t, rho]:.1f}**" if best[t] == rho else f"{means[t, rho]:.1f}" for t in tasks]
            rows.append([method_name(method), f"{rho:g}", *cells])
    parts.append(table(["method", "rho", *(TASKS[task] for task in tasks)], rows))
    return "\n\n".join(parts)


def _mean(runs: list[Run]) -> float:
    return summarize([primary(run) for run in runs]).mean


def glue_section() -> str:
    """The final runs there are."""
    cells = by_cell(read_runs(RESULTS / "glue").finished)
    tasks = [task for task in TASKS if any(key[0] == task for key in cells)]
    rows = []
    for method in sorted({key[2] for key in cells}, key=method_order):
        found = [cells.get((task, MODEL, method), []) for task in tasks]
        shown = [f"{with_interval(map(primary, runs), 1)} (n = {len(runs)})" if runs else "-" for runs in found]
        rows.append([method_name(method), *shown])
    return "\n\n".join([
        "## GLUE so far",
        "Development set, final weights; the methods without a radius to choose, at this package's default settings.",
        table(["method", *(TASKS[task] for task in tasks)], rows),
        FREELB,
    ])  # fmt: skip


def learning_rates() -> str:
    """The learning rate of each task."""
    runs = [r for name in ("lr-glue", "lr-sst2") for r in read_runs(RESULTS / name).finished]
    rates = sorted({dict(run.settings)["lr"] for run in runs})
    rows = []
    for task in [task for task in TASKS if any(run.task == task for run in runs)]:
        means = {lr: _mean([r for r in runs if r.task == task and dict(r.settings)["lr"] == lr]) for lr in rates}
        best = max(means, key=lambda lr: means[lr])
        rows.append([TASKS[task], *(f"**{m:.1f}**" if lr == best else f"{m:.1f}" for lr, m in means.items())])
    return "\n\n".join([
        "## Learning rates",
        "Plain training, two seeds, the last tenth of the training set; four epochs, SST-2 one.",
        "    deltasam sweep configs/sweeps/evidence/lr-glue.yaml --output results/lr-glue",
        table(["task", *(f"{lr:g}" for lr in rates)], rows),
    ])  # fmt: skip


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.strip(), risk_section(), READING.strip(), weights["weights_section"](), tuning_section()]
    return "\n\n".join([*filter(None, parts), glue_section(), learning_rates(), MISSING.strip()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
