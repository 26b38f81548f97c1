"""Writes docs/results.md from the runs in results/: what was measured again, beside the paper's figures.

Reads result.json files alone, needs no torch:

    python benchmarks/results_page.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from deltasam.report import Comparison, Run, holm, method_name, method_order, paired_test, paper, read_runs, summarize
from deltasam.report._select import by_cell

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "results"
MODEL = "bert-small-wiki"
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

NAMES = {
    "FiniteDifference": "Eq. 5", "Directional": "derivatives along r", "OwnGradient": "own gradient",
    "another direction": "another random direction", "bf16": "bfloat16 (autocast)",
    "DeltaSAM FiniteDifference": "δ-SAM, Eq. 5", "DeltaSAM Directional": "δ-SAM, derivatives along r",
    "DeltaSAM OwnGradient": "δ-SAM, own gradient", "DeltaSAM RandomWeights": "δ-SAM, weights of Eq. 5 shuffled",
}  # fmt: skip

WEIGHTS = """## Do the weights measure anything?

The paper wants weights g_i = a_i ||grad l_i|| (with H_i = a_i grad l_i grad l_i^T), estimates them along one random
direction r of norm rho (Eq. 5), and argues that the perturbation of the reweighted batch then moves the model as a
perturbation per instance would: the cosine of dR/dw with dR_inst/dw is to be positive. All of that can be measured.

Models: the same encoder, plain training on MRPC, one seed, batch 32, learning rate 1e-4 without decay, float32, at
{count} points of one path; accuracy on the development set {accuracy} updates (68.4 is the larger class; 114 updates
are an epoch). Measured on {rows} training rows, a fixed random sample, in {batches} batches of 8 (R-Drop's batch for
RTE), each with a random direction of its own; rho = 0.05, eta = 1e-4; eval mode except where dropout is named; one
core of a CPU (Neoverse-N1), bfloat16 computed by way of float32. Means over the batches with 95% bootstrap intervals,
which for so few batches are rather too short than too long, and are not corrected for their number.

    deltasam sweep configs/sweeps/evidence/weights.yaml --output runs/weights
    deltasam analyze weights RUN --split train --rows {rows} --batch-size 8 --json --weightings FiniteDifference
    deltasam analyze weights ... --weightings OwnGradient --conditions float32 bf16 "dropout, shared masks"
    deltasam analyze weights ... --weightings Directional --conditions float32 "another direction"
    deltasam analyze alignment RUN --split train --rows {rows} --batch-size 8 --json \\
        --weightings FiniteDifference OwnGradient RandomWeights"""

REPEAT = """Rank correlation of g with the same estimator in float64, without dropout, along the same direction: 1 is
perfect, 0 is chance."""

SIGNAL = """Signal over noise: the variance of g over the instances in float64, over the mean squared difference from
it, both scaled to mean 1; geometric mean over the batches. Weights that are all equal have 1."""

IDEAL = """Rank correlation of g with a_i ||grad l_i|| along each instance's own gradient, in float64."""

ALIGNMENT = """Cosine of dR/dw with dR_inst/dw of the exact perturbation per instance, which itself has 1 by
definition; float32, the same batches. In brackets the cosine of the whole gradient with the exact one's."""

WEIGHTS_READING = """### What the weights say

One small model, one task, one seed, the first epoch, {rows} rows, rho = 0.05. Within that:

- **The weights of Eq. 5 carry no signal that could be seen.** In float32 they rank the instances of a batch no better
  than chance beside the same formula in float64, and are about three times as large: rounding. Exact derivatives along
  r repair that (at 60 updates), but in float64, too, one direction does not agree with another. With dropout masks of
  their own in every probe the weights are three to four thousand times as large, and no more informative.
- **They are not the weights the theory asks for.** In float64 the rank correlation with a_i ||grad l_i|| is small, and
  the intervals contain 0. In float32 it is negative (at 114 updates the interval contains 0), probably because
  rounding is divided by the first difference, which is small where the gradient is.
- **The theory's weights can be had.** Along each instance's own gradient they come out the same in float32, and nearly
  so in bfloat16. Dropout changes them: with its masks it is another model.
- **The paper's condition holds, but not because of the weights.** The cosine with dR_inst/dw is positive for every
  method on every batch, for SAM and for shuffled weights, too. delta-SAM's is lower than SAM's at all three points (at
  60 updates the interval all but touches 0), and cannot be told from that of shuffled weights. The theory's own
  weights do not clearly exceed SAM either.

So on this model and at this radius the weights do not do what section 3 of the paper wants of them, which agrees with
the control *weights shuffled* above. Intervals this wide leave room for a weak signal; larger radii of the probes,
more draws, other tasks and larger models were not measured.
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


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def with_interval(values: Iterable[float], digits: int) -> str:
    """The mean with its interval, or the only value."""
    found = summarize(list(values))
    if found.n == 1:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


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


def weights_section() -> str:
    """Signal and noise of the weights, and where the updates point, at the points of training that were measured."""
    weights, cosines = (lines_by_point(what) for what in ("weights", "alignment"))
    runs = {run.steps: run for run in read_runs(RESULTS / "weights").finished}
    batches = {
        len(values)
        for found in (weights, cosines)
        for at in found.values()
        for line in at.values()
        for values in line.values()
    }
    facts = {
        "count": len(weights), "batches": max(batches), "rows": 8 * max(batches),
        "accuracy": ", ".join(f"{primary(runs[n]):.1f} after {n}" for n in weights),
    }  # fmt: skip
    points = [f"{n} updates" for n in weights]
    return "\n\n".join([
        WEIGHTS.format(**facts),
        "### Do the weights repeat?",
        REPEAT,
        table(["estimator", "changed", *points], over_points(weights, "spearman", two_digits)),
        SIGNAL,
        table(["estimator", "changed", *points], over_points(weights, "snr", geometric)),
        "The median weight, mean over the batches:",
        table(["estimator", "computed in", *points], over_points(weights, "median", size)),
        "### Are they what the theory asks for?",
        IDEAL,
        table(["estimator", "computed in", *points], over_points(weights, "ideal", two_digits)),
        "### Whose update do they point to?",
        ALIGNMENT,
        table(["method", *points], both_cosines(cosines)),
        table(["difference of cos(dR/dw, dR_inst/dw)", *points], cosine_differences(cosines)),
        WEIGHTS_READING.format(**facts).strip(),
    ])  # fmt: skip


Lines = dict[tuple[str, ...], dict[str, list[float]]]


def lines_by_point(what: str) -> dict[int, Lines]:
    """The values of the batches by estimator and condition, or by method, for every number of updates."""
    found: dict[int, Lines] = {}
    for path in sorted((RESULTS / "weights").glob(f"{what}-*.json")):
        at = found.setdefault(int(path.stem.rpartition("-")[2]), {})
        for line in json.loads(path.read_text()):
            key = (line["weighting"], line["condition"]) if what == "weights" else (line["method"],)
            at.setdefault(key, line["by_batch"])
    return dict(sorted(found.items()))


def over_points(found: dict[int, Lines], field: str, shown: Callable[[list[float]], str]) -> list[list[str]]:
    """One row per estimator and condition, or per method; one column per point of training."""
    keys = [key for key in dict.fromkeys(key for lines in found.values() for key in lines) if not trivial(key, field)]
    return [
        [*(NAMES.get(part, part) for part in key)]
        + [shown(lines[key][field]) if key in lines else "-" for lines in found.values()]
        for key in keys
    ]


def trivial(key: tuple[str, ...], field: str) -> bool:
    """Rows that say 1 by definition, or nothing new."""
    if field == "median":
        return key[0] != "FiniteDifference" or key[1] == "another direction"
    if field == "ideal":
        return key[1] not in ("float64", "float32") or key[0] == "OwnGradient"
    return key[-1] in ("float64", "PerInstanceSAM")


def geometric(values: Iterable[float]) -> str:
    """The geometric mean with its interval."""
    found = summarize([math.log(value) for value in values])
    return "{:.2g} [{:.2g}, {:.2g}]".format(*map(math.exp, (found.mean, found.low, found.high)))


def cosine_differences(found: dict[int, Lines]) -> list[list[str]]:
    """Paired over the batches."""
    weighted, shuffled, own = (f"DeltaSAM {name}" for name in ("FiniteDifference", "RandomWeights", "OwnGradient"))
    rows = []
    for a, b in ((weighted, "SAM"), (weighted, shuffled), (shuffled, "SAM"), (own, "SAM"), (own, weighted)):
        pairs = [zip(lines[a,]["regulariser"], lines[b,]["regulariser"], strict=True) for lines in found.values()]
        rows.append([f"{NAMES.get(a, a)} - {NAMES.get(b, b)}", *(two_digits([x - y for x, y in p]) for p in pairs)])
    return rows


def both_cosines(found: dict[int, Lines]) -> list[list[str]]:
    """The cosine of the regulariser's gradient and, in brackets, of the whole gradient."""
    ours, whole = (over_points(found, field, two_digits) for field in ("regulariser", "update"))
    return [
        [a[0], *(f"{x} ({y})" for x, y in zip(a[1:], b[1:], strict=True))] for a, b in zip(ours, whole, strict=True)
    ]


def size(values: Iterable[float]) -> str:
    """The mean of numbers that differ by powers of ten."""
    return f"{summarize(list(values)).mean:.1e}"


def two_digits(values: Iterable[float]) -> str:
    """The mean with its interval."""
    return with_interval(values, 2)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.strip(), risk_section(), READING.strip(), weights_section(), tuning_section()]
    return "\n\n".join([*filter(None, parts), glue_section(), learning_rates(), MISSING.strip()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
