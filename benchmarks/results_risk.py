"""The section of docs/results.md on adversarial risk (the paper's Table 4), from results/adversarial-risk."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltasam.lab.report import Run, paper, read_runs, summarize

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))
table, with_interval, primary = common["table"], common["with_interval"], common["primary"]

RHO, EPOCHS = 0.05, 3
RISK = """The paper's Table 4 with one radius for all, rho = 0.05, where no other is named, and a control: *weights
shuffled* is delta-SAM with its own weights g dealt out to the instances of the batch at random. It has the same
distribution of weights, the same cost, and no information. L_adv is measured at rho = 0.05 for all."""


def risk_of(run: Run) -> float:
    """The adversarial risk, nan where it was not measured."""
    found = run.risk()
    return float("nan") if found is None else float(found["value"])


def risk_section(results: Path) -> str:
    """Table 4: risk and accuracy, and what the weights contribute."""
    runs = [run for run in read_runs(results / "adversarial-risk").finished if run.risk() is not None]
    if not runs:
        return ""
    parts = [
        "## Adversarial risk, and what the weights contribute",
        RISK,
        "    deltasam sweep configs/sweeps/evidence/adversarial-risk.yaml --output results/adversarial-risk",
    ]
    for task in [name for name in common["TASKS"] if any(run.task == name for run in runs)]:
        ours = by_name([run for run in runs if run.task == task and run.model == common["MODEL"]])
        parts += [
            f"### {common['TASKS'][task]}, development set", risk_table(task, ours),
            common["folded"]("Differences, paired by seed", risk_tests(ours), common["HOLM"]),
        ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by method; another radius, and a longer training, make another row."""
    found: dict[str, list[Run]] = {}
    keys = {}
    for run in runs:
        rho = dict(run.settings).get("rho", RHO)
        name = run.method + (f", rho = {rho:g}" if rho != RHO else "")
        length = common["config"](run)["schedule"]["epochs"] / EPOCHS
        name += {1: "", 2: ", twice as long"}.get(length, f", {length:g} times as long")
        found.setdefault(name, []).append(run)
        keys[name] = (common["order"](run.method), -rho, run.steps)
    return {name: common["once"](found[name]) for name in sorted(found, key=lambda name: keys[name])}


def risk_table(task: str, ours: Mapping[str, Sequence[Run]]) -> str:
    """One row per method; the paper's figures are those of BERT-base."""
    rows = []
    theirs = paper.ADVERSARIAL_RISK.figures["BERT-base"]
    for name, runs in ours.items():
        scores = [primary(run) for run in runs]
        # The paper trains per instance for twice the epochs.
        longer = "PerInstanceSAM, twice as long"
        row = {longer: "PerInstanceSAM", "PerInstanceSAM": ""}.get(name, name)
        paper_risk = theirs.get(row, {}).get(f"{task} risk")
        middle, best = (theirs.get(row, {}).get(f"{task} {what}") for what in ("median", "max"))
        known = "-" if paper_risk is None else f"{paper_risk:.2f}; {middle} / {best}"
        rows.append([
            common["shown"](name), str(len(runs)), with_interval(map(risk_of, runs), 2), with_interval(scores, 1),
            f"{summarize(scores).median:.1f} / {max(scores):.1f}", f"{max(scores[:5]):.1f}", known,
        ])  # fmt: skip
    head = ["method", "seeds", "L_adv", "accuracy", "median / max", "best of 5 seeds", "paper: L_adv; median / max"]
    return str(table(head, rows))


def risk_tests(ours: Mapping[str, Sequence[Run]]) -> str:
    """Paired comparisons over the seeds that two methods share."""
    pairs = [(name, "ERM") for name in ours if name != "ERM"]
    pairs += [(name, "SAM") for name in ours if name not in ("ERM", "SAM")]
    pairs += [(name, "DeltaSAM") for name in ours if name.startswith(("DeltaSAM(", "PerInstanceSAM"))]
    found: str = common["difference_table"]({"L_adv": (ours, risk_of), "accuracy, points": (ours, primary)}, pairs)
    return found
