"""The section of docs/results.md on radii below the paper's grid: CoLA, where every method chose the smallest."""

from __future__ import annotations

import runpy
from pathlib import Path

from deltasam.lab.report import Run, method_name, read_runs

HERE = Path(__file__).parent
glue = runpy.run_path(str(HERE / "results_glue.py"))
common, table, with_interval, primary = (glue[name] for name in ("common", "table", "with_interval", "primary"))

panels = runpy.run_path(str(HERE / "interval_plot.py"))["panels"]

TASK, PLOT = "cola", "radius.svg"
METHODS = ("SAM", "DeltaSAM", "DeltaSAM(LossWeights)", "PerInstanceSAM")
PAIRS = [
    *((method, "ERM") for method in METHODS),
    *((method, "SAM") for method in METHODS[1:]),
    ("DeltaSAM(LossWeights)", "DeltaSAM"),
]

ABOUT = """On CoLA every sharpness-aware method chose the smallest radius it was offered. These are smaller ones, and
those chosen: ten seeds each, development set, final weights. **Nothing is chosen here**; all that was run is shown.
Plain training, which is the radius 0, has {plain}."""

Radii = dict[float, dict[str, list[Run]]]
"""Radius -> method -> runs by seed."""


def runs_by_radius(results: Path) -> tuple[Radii, list[Run]]:
    """The runs at every radius, and plain training."""
    _, finals = glue["parts_of"](results)
    found: dict[float, dict[str, list[Run]]] = {}
    plain = []
    for run in [*finals, *read_runs(results / "radius-cola").finished]:
        if run.task != TASK:
            continue
        if run.method == "ERM":
            plain.append(run)
        elif run.method in METHODS:
            found.setdefault(dict(run.settings)["rho"], {}).setdefault(run.method, []).append(run)
    radii = {
        rho: {method: common["once"](found[rho][method]) for method in METHODS if method in found[rho]}
        for rho in sorted(found)
    }
    return radii, common["once"](plain)


def radius_section(results: Path) -> str:
    """Means, and differences to plain training and to SAM at the same radius; nothing without the runs."""
    radii, plain = runs_by_radius(results)
    if not (results / "radius-cola").is_dir() or not plain:
        return ""
    most = max(len(runs) for methods in radii.values() for runs in methods.values())
    rows = [
        [method_name(method), *(glue["cell"](at.get(method, []), most) for at in radii.values())] for method in METHODS
    ]
    columns = {f"rho = {rho:g}": ({**at, "ERM": plain}, primary) for rho, at in radii.items()}
    return "\n\n".join([
        "## CoLA, smaller radii",
        ABOUT.format(plain=with_interval(map(primary, plain), 1)),
        f"    deltasam sweep {glue['SWEEPS']}/radius-cola.yaml --output results/radius-cola",
        table(["method", *columns], rows),
        f"![Scores on CoLA over the radius](_static/results/{PLOT})",
        common["difference_table"](columns, PAIRS),
        common["HOLM"],
    ])  # fmt: skip


def plots(results: Path) -> dict[str, str]:
    """File name -> the scores at every radius, 0 being plain training, and how far each is from SAM there."""
    radii, plain = runs_by_radius(results)
    if not (results / "radius-cola").is_dir() or not plain:
        return {}
    columns = list(radii.values())

    def ends(runs: list[Run]) -> tuple[float, float, float]:
        found: tuple[float, float, float] = glue["ends"]([primary(run) for run in runs])
        return found

    score = {method_name("ERM"): [ends(plain), *([None] * len(columns))]}
    score |= {method_name(m): [None, *(ends(at[m]) if m in at else None for at in columns)] for m in METHODS}
    to_sam = {
        method_name(m): [
            None,
            *(glue["to_plain"](at[m], at["SAM"]) if {m, "SAM"} <= set(at) else None for at in columns),
        ]
        for m in METHODS[1:]
    }
    drawn: str = panels(
        {"Matthews correlation, times 100": score, "points above SAM at the same radius": to_sam},
        places=["0", *(f"{rho:g}" for rho in radii)], x="rho",
        ticks=((18, 20, 22, 24, 26, 28), (-6, -4, -2, 0, 2, 4, 6)),
    )  # fmt: skip
    return {PLOT: drawn}
