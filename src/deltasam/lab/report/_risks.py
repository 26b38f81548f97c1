"""Chooses comparable adversarial risks: one radius, and the same settings for each task and model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from deltasam.lab.report._runs import Run
from deltasam.lab.report._select import Cells

PAPER_RHO = 0.05


class Risks(NamedTuple):
    """Risks of one radius."""

    values: dict[str, float]  #: Risk by run id.
    notes: tuple[str, ...]  #: The radius, and what was left out.


def chosen_risks(cells: Cells, rho: float | None = None) -> Risks:
    """Returns the risks at one radius, by default the most frequent one, and with one kind of settings per setup."""
    runs = [(key[:2], run) for key, found in cells.items() for run in found]
    measured = [(setup, run, risk) for setup, run in runs if (risk := run.risk()) is not None]
    radii = [risk["settings"]["rho"] for *_, risk in measured if "rho" in risk["settings"]]
    radius = rho if rho is not None else _most_frequent(radii, lambda one: (abs(one - PAPER_RHO), one))
    at_radius = [one for one in measured if one[2]["settings"].get("rho") == radius]
    usual = {
        setup: _most_frequent((_settings(risk) for at, _, risk in at_radius if at == setup), _most_rows)
        for setup in {setup for setup, *_ in at_radius}
    }
    kept = {run.run_id: float(risk["value"]) for at, run, risk in at_radius if _settings(risk) == usual[at]}
    if radius is None:
        notes = ["Ours at a radius that was not recorded." if kept else "No run has a measured risk yet."]
    else:
        notes = [f"Ours at rho = {radius:g}." if kept else f"No run has a risk measured at rho = {radius:g}."]
    left = Counter(_description(risk["settings"]) for _, run, risk in measured if run.run_id not in kept)
    if left:
        others = "; ".join(f"{count} {how}" for how, count in sorted(left.items()))
        notes.append(f"Risks left out because of other settings: {others}; --rho chooses the radius.")
    return Risks(kept, tuple(notes))


def usual_risk(runs: Iterable[Run], *, rho: float | None = None, rows: int | None = None) -> dict[str, Any]:
    """Returns the most frequent settings of the risks measured so far, so that new ones are comparable to them.

    Args:
        runs: The runs.
        rho: The radius; by default the most frequent one, the paper's if there is none.
        rows: The number of rows; by default the most frequent one, 256 if there is none.
    """
    known = [_settings(risk) for run in runs if (risk := run.risk()) is not None and "rho" in risk["settings"]]
    at_radius = [one for one in known if rho is None or json.loads(one)["rho"] == rho]
    usual = json.loads(_most_frequent(at_radius or known, _most_rows) or "{}")
    standard = {"rho": PAPER_RHO, "rows": 256, "steps": 1, "split": None}
    wanted = {name: usual.get(name, value) for name, value in standard.items()}
    return wanted | {name: value for name, value in (("rho", rho), ("rows", rows)) if value is not None}


def _most_frequent(found: Iterable[Any], order: Callable[[Any], Any]) -> Any:
    """The most frequent item, the first in the given order among equals; None if there is none."""
    counts = Counter(found)
    return min(counts, key=lambda one: (-counts[one], order(one)), default=None)


def _settings(risk: Mapping[str, Any]) -> str:
    return json.dumps(risk["settings"], sort_keys=True)


def _most_rows(settings: str) -> tuple[float, str]:
    rows = json.loads(settings).get("rows")
    return -rows if isinstance(rows, (int, float)) else 0, settings


def _description(settings: Mapping[str, Any]) -> str:
    if "rho" not in settings:
        return "at a radius that was not recorded"
    others = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "rho" and value is not None)
    return f"at rho = {settings['rho']:g}" + (f" ({others})" if others else "")
