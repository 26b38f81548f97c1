"""The section of docs/results.md on delta-SAM's weights, from the measurements of weights_run.py (or older ones).

``with_interval`` serves the rest of the page, too. What was found is told in ``WEIGHTS_READING``, written by hand.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltasam.lab.report import holm, paired_test, summarize

HERE = Path(__file__).parent
table = runpy.run_path(str(HERE / "page_tables.py"))["table"]
panels = runpy.run_path(str(HERE / "interval_plot.py"))["panels"]
_points = runpy.run_path(str(HERE / "weights_points.py"))
measured, further = _points["points"], _points["further_points"]

NAMES = {
    "FiniteDifference": "Eq. 5", "Directional": "derivatives along r", "OwnGradient": "own gradient",
    "another direction": "another random direction", "bf16": "bfloat16 (autocast)",
    "DeltaSAM FiniteDifference": "δ-SAM, Eq. 5", "DeltaSAM Directional": "δ-SAM, derivatives along r",
    "DeltaSAM OwnGradient": "δ-SAM, own gradient", "DeltaSAM RandomWeights": "δ-SAM, weights of Eq. 5 shuffled",
    "DeltaSAM LossWeights": "δ-SAM, weights by the loss",
    "FiniteDifference(radius=0.5)": "Eq. 5, probes of norm 0.5",
    "FiniteDifference(radius=2.0)": "Eq. 5, probes of norm 2",
    "FiniteDifference(samples=8)": "Eq. 5, 8 directions",
    "DeltaSAM FiniteDifference(radius=0.5)": "δ-SAM, Eq. 5, probes of norm 0.5",
    "DeltaSAM FiniteDifference(radius=2.0)": "δ-SAM, Eq. 5, probes of norm 2",
    "DeltaSAM FiniteDifference(samples=8)": "δ-SAM, Eq. 5, 8 directions",
}  # fmt: skip

WEIGHTS = """## Do the weights measure anything?

The paper wants weights g_i = a_i ||grad l_i|| (with H_i = a_i grad l_i grad l_i^T), estimates them along one random
direction r of norm rho (Eq. 5), and argues that the perturbation of the reweighted batch then moves the model as a
perturbation per instance would: the cosine of dR/dw with dR_inst/dw is to be positive. All of that can be measured.

Models: the same encoder, plain training on MRPC, one seed, batch 32, learning rate 1e-4 without decay, float32, at
{count} points of one path{others}; accuracy on the development set {accuracy} updates (68.4 is the larger class;
114 updates are an epoch). Measured on {rows} training rows, a fixed random sample, in {batches} batches of {size}
(R-Drop's batch for RTE), each with a random direction of its own; rho = 0.05, eta = 1e-4; eval mode except where
dropout is named; {machine}"""

OLD_MACHINE = """one core of a CPU (Neoverse-N1), bfloat16 computed by way of float32. Means over the batches
with 95% bootstrap intervals, which for so few batches are rather too short than too long, and are not corrected for
their number.

    deltasam sweep configs/sweeps/evidence/weights.yaml --output runs/weights
    deltasam analyze weights RUN --split train --rows {rows} --batch-size 8 --json --weightings FiniteDifference
    deltasam analyze weights ... --weightings OwnGradient --conditions float32 bf16 "dropout, shared masks"
    deltasam analyze weights ... --weightings Directional --conditions float32 "another direction"
    deltasam analyze alignment RUN --split train --rows {rows} --batch-size 8 --json \\
        --weightings FiniteDifference OwnGradient RandomWeights"""

MACHINE = """{device}, TF32 off, torch {torch}, commit {commit}.
Means over the batches with 95% bootstrap intervals: what other batches would say of the same models. The intervals are
not corrected for their number, the p-values are.

    {command}"""

REPEAT = """Rank correlation of g with the same estimator in float64, without dropout, along the same direction: 1 is
perfect, 0 is chance."""

SIGNAL = """Signal over noise: the variance of g over the instances in float64, over the mean squared difference from
it, both scaled to mean 1; geometric mean over the batches. Weights that are all equal have 1."""

IDEAL = """Rank correlation of g with a_i ||grad l_i|| along each instance's own gradient, in float64."""

ALIGNMENT = """Cosine of dR/dw with dR_inst/dw of the exact perturbation per instance, which itself has 1 by
definition; float32, the same batches. In brackets the cosine of the whole gradient with the exact one's."""

FURTHER = """### The same on more rows

{rows} training rows in {batches} batches of {size}, larger probes, and weights averaged over eight directions; the
rest as above, but for the model, which was trained on the same machine; accuracy {accuracy} updates.
{machine}

Rank correlation with the same estimator in float64, without dropout, along the same direction:"""

FURTHER_READING = """So early in training float32 keeps a little of what Eq. 5 says (0.27 [0.18, 0.34]), and one
direction agrees a little with another (0.17 [0.07, 0.26]): 48 rows could not see that. Longer probes end the rounding
(0.99 at ten times the norm), and so do exact derivatives (1.00). But one direction still says little of another
(0.06 [-0.03, 0.15] and 0.17), and with the weights the theory asks for neither has a positive correlation. Eight
directions together agree with eight others (0.54 [0.46, 0.61]) in float64; in float32 rounding eats all of it."""

WEIGHTS_READING = """### What the weights say

One small model, one task, one seed, {rows} rows, rho = 0.05. Within that:

- **In the first epoch the weights of Eq. 5 carry no signal that {rows} rows could show; after three they do, but
  float32 loses it.** In float32 they rank the instances of a batch no better than chance beside the same formula in
  float64, at all four points, and are three to ten times as large: rounding. Exact derivatives along r repair that
  (at 60 updates). In float64 one direction does not agree with another during the first epoch. After three, when most
  rows are fitted, it does (0.69 [0.49, 0.78]), probably because any direction then tells the rows that are fitted
  from those that are not. With dropout masks of their own in every probe the weights are thousands of times as large,
  and never informative.
- **They are not the weights the theory asks for.** In float64 the rank correlation with a_i ||grad l_i|| is small,
  and the intervals contain 0, at all four points. In float32 it is negative (later than 60 updates the intervals
  contain 0), probably because rounding is divided by the first difference, which is small where the gradient is.
- **The theory's weights can be had.** Along each instance's own gradient they come out the same in float32, and
  nearly so in bfloat16. Dropout changes them: with its masks it is another model.
- **The paper's condition holds, but not because of the weights.** The mean cosine with dR_inst/dw is positive for
  every method, for SAM and for shuffled weights, too. delta-SAM's is lower than SAM's at all four points (at 60
  updates the interval all but touches 0), and cannot be told from that of shuffled weights. The theory's own weights
  have the highest mean late (0.11 [0.00, 0.38] above SAM after three epochs), which six batches do not settle.

So on this model and at this radius the weights do not do what section 3 of the paper wants of them, which agrees with
the control *weights shuffled* above. What they do on CoLA, and on a larger encoder, follows. Larger
probes and several directions were measured on one model of this section only.
"""


def with_interval(values: Iterable[float], digits: int) -> str:
    """The mean with its interval, or the only value."""
    found = summarize(list(values))
    if found.n == 1:
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


Lines = Mapping[tuple[str, ...], Mapping[str, list[Any]]]


def weights_section(results: Path) -> str:
    """Signal and noise of the weights, and where the updates point, for the models that were measured, if any."""
    found = measured(results)
    if not found:
        return ""
    weights, cosines = ({p.name: getattr(p, what) for p in found} for what in ("weights", "alignment"))
    points = [point.name for point in found]
    facts = facts_of(found)
    return "\n\n".join([
        WEIGHTS.format(**facts),
        "### Do the weights repeat?",
        REPEAT,
        "![Rank correlation of the weights](_static/results/weights.svg)",
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
        differences_table(cosines),
        *further_section(further(results)),
        WEIGHTS_READING.format(**facts).strip(),
    ])  # fmt: skip


def further_section(found: Sequence[Any]) -> list[str]:
    """What a measurement on more rows says that is of fewer models than the others."""
    if not found:
        return []
    weights, points = {p.name: p.weights for p in found}, [p.name for p in found]
    return [
        FURTHER.format(**facts_of(found)),
        table(["estimator", "changed", *points], over_points(weights, "spearman", two_digits)),
        IDEAL.replace("Rank correlation of g with", "Rank correlation with"),
        table(["estimator", "computed in", *points], over_points(weights, "ideal", two_digits)),
        FURTHER_READING,
    ]


def facts_of(found: Sequence[Any]) -> dict[str, Any]:
    """How it was measured, in words."""
    plain = [point for point in found if point.method == "ERM"]
    others = [point for point in found if point.method != "ERM"]
    about = found[0].about
    size, batches = about.get("batch_size", 8), max(point.batches for point in found)
    rows = about.get("rows", size * batches)
    machine = MACHINE.format(**about) if about else OLD_MACHINE.format(rows=rows)
    accuracy = [f"{p.accuracy:.1f} after {p.updates}" for p in plain]
    accuracy += [f"{p.accuracy:.1f} with {p.method} after {p.updates}" for p in others]
    trained = "".join(f", and {p.method} (rho = 0.05) after {p.updates}" for p in others)
    return {
        "count": len(plain), "others": trained, "accuracy": ", ".join(accuracy), "rows": rows, "batches": batches,
        "size": size, "machine": machine,
    }  # fmt: skip


def plot(results: Path) -> str:
    """Rank correlation with float64, and of one direction with another, by estimator and model."""
    found = measured(results)
    shown = {}
    for title, condition in (("float32 with float64", "float32"), ("one direction with another", "another direction")):
        estimators = dict.fromkeys(name for p in found for name, at in p.weights if at == condition)
        lines = [[p.weights.get((name, condition), {}).get("spearman") for p in found] for name in estimators]
        shown[f"Rank correlation, {title}"] = {
            NAMES.get(name, name): [None if values is None else _with_ends(values) for values in line]
            for name, line in zip(estimators, lines, strict=True)
        }
    models = [str(p.updates) if p.method == "ERM" else f"{p.method} {p.updates}" for p in found]
    drawn: str = panels(shown, places=models, x="updates")
    return drawn


def _with_ends(values: Iterable[float | None]) -> tuple[float, float, float]:
    found = summarize(numbers(values))
    return found.mean, found.low, found.high


def numbers(values: Iterable[float | None]) -> list[float]:
    """Without the batches that have no number: a rank correlation needs weights that are not all equal."""
    return [value for value in values if value is not None]


def over_points(found: Mapping[Any, Lines], field: str, shown: Callable[[list[float]], str]) -> list[list[str]]:
    """One row per estimator and condition, or per method; one column per point of training."""
    keys = [key for key in dict.fromkeys(key for lines in found.values() for key in lines) if not trivial(key, field)]
    return [
        [*(NAMES.get(part, part) for part in key)]
        + [cell(lines[key][field], shown) if key in lines else "-" for lines in found.values()]
        for key in keys
    ]


def cell(values: Sequence[float | None], shown: Callable[[list[float]], str]) -> str:
    """What the batches say, and how many of them where some say nothing."""
    known = numbers(values)
    if not known:
        return "-"
    return shown(known) + ("" if len(known) == len(values) else f" ({len(known)} of {len(values)} batches)")


def trivial(key: tuple[str, ...], field: str) -> bool:
    """Rows that say 1 by definition, or nothing new."""
    if field == "median":
        return not key[0].startswith("FiniteDifference") or key[1] == "another direction"
    if field == "ideal":
        return key[1] not in ("float64", "float32") or key[0] == "OwnGradient"
    return key[-1] in ("float64", "PerInstanceSAM")


def geometric(values: Iterable[float]) -> str:
    """The geometric mean with its interval."""
    found = summarize([math.log(max(value, 1e-30)) for value in values])  # all weights equal: no signal at all
    return "{:.2g} [{:.2g}, {:.2g}]".format(*map(math.exp, (found.mean, found.low, found.high)))


def differences_table(found: Mapping[str, Lines]) -> str:
    """Paired over the batches, with p-values where so many batches can give a small one."""
    rows = cosine_differences(found)
    note = "\n\np of paired permutation tests over the batches, after Holm's correction." if "(p" in str(rows) else ""
    return table(["difference of cos(dR/dw, dR_inst/dw)", *found], rows) + note


def cosine_differences(found: Mapping[str, Lines]) -> list[list[str]]:
    """One row per pair of methods, one column per model."""
    weighted, shuffled, own = (f"DeltaSAM {name}" for name in ("FiniteDifference", "RandomWeights", "OwnGradient"))
    pairs = [(weighted, "SAM"), (weighted, shuffled), (shuffled, "SAM"), (own, "SAM"), (own, weighted)]
    others = dict.fromkeys(name for lines in found.values() for (name,) in lines if name.startswith(weighted + "("))
    pairs += [
        (name, b) for name in (*others, "DeltaSAM Directional", "DeltaSAM LossWeights") for b in ("SAM", shuffled)
    ]
    pairs = [(a, b) for a, b in pairs if all((a,) in lines and (b,) in lines for lines in found.values())]
    tests = [
        (row, lines[a,]["regulariser"], lines[b,]["regulariser"])
        for row, (a, b) in enumerate(pairs)
        for lines in found.values()
    ]
    rows = [[f"{NAMES.get(a, a)} - {NAMES.get(b, b)}"] for a, b in pairs]
    outcomes = [paired_test(first, second) for _, first, second in tests]
    telling = all(2.0 ** (1 - outcome.pairs) * len(tests) < 0.05 for outcome in outcomes)  # few batches: p = 1
    for (row, first, second), p in zip(tests, holm([outcome.p for outcome in outcomes]), strict=True):
        mean = two_digits([x - y for x, y in zip(first, second, strict=True)])
        rows[row].append(f"{mean} (p = {p:.2g})" if telling else mean)
    return rows


def both_cosines(found: Mapping[str, Lines]) -> list[list[str]]:
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
