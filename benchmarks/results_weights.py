"""The section of docs/results.md on delta-SAM's weights, from the measurements in results/weights.

``with_interval`` serves the rest of the page, too.
"""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

from deltasam.report import read_runs, summarize

RESULTS = Path(__file__).parents[1] / "results"
table = runpy.run_path(str(Path(__file__).with_name("page_tables.py")))["table"]

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


def with_interval(values: Iterable[float], digits: int) -> str:
    """The mean with its interval, or the only value."""
    found = summarize(list(values))
    if found.n == 1:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


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
        "accuracy": ", ".join(f"{100 * runs[n].metrics[runs[n].primary]:.1f} after {n}" for n in weights),
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
