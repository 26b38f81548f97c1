"""Language models: the metric, NLL, ECE, forgetting and rounded weights, by what is trained and what is perturbed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.curves import Line, curves, ends
from deltasam.lab.pages.effects import (
    FEWEST,
    NO_RUNS,
    Groups,
    arms_of,
    common_setups,
    effect_table,
    mean,
    missing,
    noted,
    shown,
)
from deltasam.lab.pages.evidence import PLAIN, arm_name, clean, evidence, of_arm, paired, topic, values, with_arms
from deltasam.lab.pages.plan import cells, finals_of
from deltasam.lab.pages.rounding import draw
from deltasam.lab.pages.runs import read
from deltasam.lab.pages.statistics import table

PARTS = {"": "whole model", "LoRA": "LoRA"}
METRICS = {"score": "metric", "nll": "NLL x 100", "ece": "ECE x 100", "forgetting": "forgetting x 100",
           "score_8bit": "8 bits", "score_4bit": "4 bits", "score_3bit": "3 bits"}  # fmt: skip
_FULL = [PLAIN, *(arm_name(method) for method in ("SAM", "PerInstanceSAM", "RandomPerturbation"))]
_FROZEN = [f"{arm_name(method)}, frozen weights" for method in ("PerInstanceSAM", "RandomPerturbation", "BiLoRA")]
KINDS = {"": _FULL, "LoRA": [*_FULL[:3], *_FROZEN]}
_FORGETTING = "forgetting: NLL on general text"
_RADII = {False: 0.01, True: 0.005}  # of arms that perturb what they train, and of those on frozen weights


def runs(results: Path, part: str) -> pd.DataFrame:
    """The clean runs in which the whole model (``""``) or ``LoRA`` adapters are trained."""
    frame = clean(topic(results, "pays-llm"))
    if frame.empty:  # shorter trainings, of one task
        frame = clean(evidence(results, "radius-llm"))
    return frame[frame["part"] == part]


def differences(results: Path, part: str) -> str:
    """Arms by metrics, over the tasks: difference to plain training of the same part, paired by seed."""
    frame = runs(results, part)
    planned = cells(results, "pays-llm")
    own = planned[planned["setup"].str.endswith(", LoRA").astype(bool) == bool(part)]
    return noted(effect_table(frame, METRICS, KINDS[part]), missing(own))


def by_task(results: Path, part: str) -> str:
    """Tasks and arms by metrics: plain training, then the differences of the other arms to it, paired by seed."""
    frame, rows = runs(results, part), []
    for setup in frame["setup"].unique():
        own = frame[frame["setup"] == setup]
        base = of_arm(own, PLAIN)
        for arm in arms_of(own, [PLAIN]):
            found = of_arm(own, arm)
            cells = [
                mean(values(found, metric)) if arm == PLAIN else shown(paired(found, base, metric))
                for metric in METRICS
            ]
            rows.append([setup.partition(",")[0], arm, str(len(found)), *cells])
    return NO_RUNS if frame.empty else table(["task", "method", "seeds", *METRICS.values()], rows)


def chat(results: Path) -> str:
    """Summaries as chat: differences to plain training of the same part, paired by seed. The metric is ROUGE-Lsum."""
    metrics = {name: title for name, title in METRICS.items() if name != "ece"}  # there are no classes
    return _of_each_part(clean(evidence(results, "llm-chat")), {**metrics, "score": "ROUGE-L"}, KINDS)


def _of_each_part(frame: pd.DataFrame, metrics: Mapping[str, str], arms: Mapping[str, Sequence[str]]) -> str:
    """A table of differences for each part that has runs, below its name."""
    own = {part: with_arms(frame[frame["part"] == part]) for part in PARTS if (frame["part"] == part).any()}
    tables = [f"**{PARTS[part]}**\n\n{effect_table(runs, metrics, arms[part])}" for part, runs in own.items()]
    return "\n\n".join(tables) or NO_RUNS


def bits(results: Path, part: str) -> str:
    """The metric against the number of bits, at one radius for the trained weights and one for the frozen ones."""
    frame = runs(results, part)
    radius = frame["params"].map(lambda params: _RADII[params == "base"])
    return draw({"": frame}, arms_of(frame[frame["rho"].isna() | (frame["rho"] == radius)], [PLAIN]))


def forgetting(results: Path) -> str:
    """Forgetting and the metric against the radius, differences to plain training; a line for each kind of arm.

    All points of a line are means over the same tasks, which its name lists: those that have all of its radii.
    """
    frame = clean(topic(results, "pays-llm"))
    if frame.empty:  # an earlier run of one seed
        frame = clean(evidence(results, "llm-radius"))
    parts: dict[str, dict[str, Line]] = {_FORGETTING: {}, "metric": {}}
    radii = sorted(frame["rho"].dropna().unique())
    for (kind, part), own in frame.groupby(["kind", "part"], sort=False):
        plain = of_arm(frame[frame["part"] == part], PLAIN)
        for title, metric in ((_FORGETTING, "forgetting"), ("metric", "score")):
            cells = {rho: paired(own[own["rho"] == rho], plain, metric) for rho in radii}
            shared = _shared(cells)
            tasks = ", ".join(setup.partition(",")[0] for setup in next(iter(shared.values()), ()))
            if len(shared) > 1:  # a single radius is no curve
                parts[title][f"{kind} ({PARTS[part]}; {tasks})"] = {rho: ends(found) for rho, found in shared.items()}
    drawn = sorted({rho for lines in parts.values() for line in lines.values() for rho in line})
    labels = ("x 100, above plain training", "points above plain training")
    return curves(parts, "radius", labels, [f"{rho:g}" for rho in drawn], drawn, zero=True)


def _shared(cells: Mapping[float, Groups]) -> dict[float, Groups]:
    """The setups that all radii have; radii without three seeds of any count only if no radius has them."""
    found = {rho: groups for rho, groups in cells.items() if groups}
    enough = {rho: groups for rho, groups in found.items() if max(map(len, groups.values())) >= FEWEST} or found
    common = common_setups(enough.values())
    return {rho: {setup: groups[setup] for setup in common} for rho, groups in enough.items() if common}


def default_radius(results: Path) -> str:
    """SAM at its default radius, and per-instance SAM on frozen weights: differences to plain training."""
    frame = clean(evidence(results, "radius-llm"))
    radius = frame["params"].eq("base").map({True: 0.005, False: 0.01})
    of_sam = (frame["method"] == "SAM") & (frame["rho"] == 0.01)
    short = {name: METRICS[name] for name in ("score", "nll", "ece", "forgetting", "score_4bit")}
    chosen = frame[frame["rho"].isna() | (frame["rho"] == radius) | of_sam]
    return _of_each_part(chosen, short, {part: [PLAIN] for part in PARTS})


def sweep_table(results: Path, sweep: str) -> str:
    """Every arm of a sweep under the name it has there: means over the seeds; ``-`` where there is no run."""
    file = results.parent / "configs" / "sweeps" / "evidence" / f"{sweep}.yaml"
    if not file.is_file():
        return NO_RUNS
    planned = [(run.method, run.config.run_id) for run in finals_of(file)]
    known = read(results, sweep, "radius-llm")  # sweeps of the same kind may share a folder
    columns = {"accuracy": "accuracy", "nll": "NLL x 100", "ece": "ECE x 100", "forgetting": "forgetting x 100",
               "accuracy_4bit": "4 bits"}  # fmt: skip
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in planned):
        ids = [run_id for name, run_id in planned if name == arm]
        own = known[known["run_id"].isin(ids)] if len(known) else known
        cells = [f"{own[name].mean():.2f}" if name in own and own[name].notna().any() else "-" for name in columns]
        rows.append([f"`{arm}`", f"{len(own)} of {len(ids)}", *cells])
    return table(["arm", "seeds", *columns.values()], rows)
