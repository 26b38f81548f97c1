"""The adversarial risks that were measured alike: risks of other radii, or on other rows, are other quantities."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltasam.lab.report._runs import Run

PAPERS_RHO = 0.05


@dataclass(frozen=True)
class Risks:
    """The risks of one radius, and of one way to measure for each task and model.

    Attributes:
        rho: The radius; None where nothing was measured.
        values: The risk by the id of the run.
        notes: The radius, and what was left out.
    """

    rho: float | None
    values: dict[str, float]
    notes: tuple[str, ...]


def chosen_risks(cells: Mapping[tuple[str, str, str], Sequence[Run]], rho: float | None = None) -> Risks:
    """The risks at one radius, with the most frequent settings of each task and model.

    Args:
        cells: (task, model, method) to runs.
        rho: The radius; by default the most frequent one.
    """
    runs = [(key[:2], run) for key, found in cells.items() for run in found]
    measured = [(setup, run, risk) for setup, run in runs if (risk := run.risk()) is not None]
    radii = [risk["settings"]["rho"] for *_, risk in measured if "rho" in risk["settings"]]
    radius = rho if rho is not None else _most(radii, _near_the_papers)
    at_radius = [one for one in measured if one[2]["settings"].get("rho") == radius]
    usual = {
        setup: _most((_settings(risk) for at, _, risk in at_radius if at == setup), _rows)
        for setup in {setup for setup, *_ in at_radius}
    }
    kept = {run.run_id: float(risk["value"]) for at, run, risk in at_radius if _settings(risk) == usual[at]}
    left = Counter(_told(risk["settings"]) for _, run, risk in measured if run.run_id not in kept)
    notes = [_heading(radius, kept)]
    if left:
        told = "; ".join(f"{count} {how}" for how, count in sorted(left.items()))
        notes.append(f"Risks left out, since they were measured otherwise: {told}; --rho chooses the radius.")
    return Risks(radius, kept, tuple(notes))


def usual_risk(runs: Iterable[Run], *, rho: float | None = None, rows: int | None = None) -> dict[str, Any]:
    """The settings to measure the risk by: the most frequent ones among the runs, so that the others can join them.

    Args:
        runs: The runs.
        rho: The radius; by default the most frequent one, the paper's where none is measured.
        rows: Rows; likewise, 256 where none is measured.
    """
    known = [_settings(risk) for run in runs if (risk := run.risk()) is not None and "rho" in risk["settings"]]
    at_radius = [one for one in known if rho is None or json.loads(one)["rho"] == rho]
    usual = json.loads(_most(at_radius or known, _rows) or "{}")
    standard = {"rho": PAPERS_RHO, "rows": 256, "steps": 1, "split": None}
    wanted = {name: usual.get(name, value) for name, value in standard.items()}
    return wanted | {name: value for name, value in (("rho", rho), ("rows", rows)) if value is not None}


def _heading(radius: float | None, kept: Mapping[str, float]) -> str:
    if radius is None:
        return "Ours at a radius that was not recorded." if kept else "No run has a measured risk yet."
    return f"Ours at rho = {radius:g}." if kept else f"No run has a risk measured at rho = {radius:g}."


def _most(found: Iterable[Any], order: Any) -> Any:
    """The most frequent one, the first in the order among equals; None if there is none."""
    counts = Counter(found)
    return min(counts, key=lambda one: (-counts[one], order(one)), default=None)


def _near_the_papers(rho: float) -> tuple[float, float]:
    return abs(rho - PAPERS_RHO), rho


def _settings(risk: Mapping[str, Any]) -> str:
    return json.dumps(risk["settings"], sort_keys=True)


def _rows(settings: str) -> tuple[float, str]:
    rows = json.loads(settings).get("rows")
    return -rows if isinstance(rows, (int, float)) else 0, settings


def _told(settings: Mapping[str, Any]) -> str:
    if "rho" not in settings:
        return "at a radius that was not recorded"
    others = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "rho" and value is not None)
    return f"at rho = {settings['rho']:g}" + (f" ({others})" if others else "")
