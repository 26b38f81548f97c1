"""Draws docs/_static/arrival.svg: how far the loss rises under bfloat16, as a share of the rise in float32.

    python benchmarks/arrives_plot.py

Left: bert-small-wiki along a training, from ``arrives.py``, before and after the rounding was made stochastic. Right:
frozen weights of SmolLM2, from ``arrives_llm.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "results" / "rounding"
NEAREST, STOCHASTIC = "#d55e00", "#0072b2"  # of Okabe and Ito: told apart by colour-blind readers
GREY = "#777777"  # readable on light and dark pages
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "deltasam", "font.size": 11, "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}  # fmt: skip
LINES = {0.003: "-", 0.01: "--"}
SOURCES = {"bf16": "bf16", "fp16": "fp16", "file": "4-bit", "off the grid": "off grid"}


def points(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_bytes())["points"]
    return found


def training(axes: Any) -> None:
    for name, colour, marker in (("arrives-before", NEAREST, "o"), ("arrives-after", STOCHASTIC, "s")):
        for rho, line in LINES.items():
            found = [p for p in points(name) if p["precision"] == "bf16" and p["rho"] == rho]
            updates, shares = [p["updates"] for p in found], [p["share"] for p in found]
            axes.plot(updates, shares, line, color=colour, marker=marker, markersize=4, linewidth=1.5)
    ticks = sorted({p["updates"] for p in found})
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("updates since the float16 checkpoint")
    axes.set_ylim(0, None)
    axes.set_title("bert-small-wiki, all weights trained", fontsize="medium")
    looks = [Line2D([], [], color=GREY, linestyle=line, label=f"ρ = {rho}") for rho, line in LINES.items()]
    axes.legend(handles=looks, frameon=False, loc="upper right")


def frozen(axes: Any, rho: float = 0.003) -> None:
    share = {(p["weights"], p["way"]): p["share"] for p in points("smollm2") if p["rho"] == rho}
    for aside, way, colour, marker in ((-0.12, "nearest", NEAREST, "o"), (0.12, "deltasam", STOCHASTIC, "s")):
        for place, source in enumerate(SOURCES):
            value = share[source, way]
            axes.plot([place + aside] * 2, [1, value], color=colour, linewidth=1.5)
            axes.plot(place + aside, value, color=colour, marker=marker, markersize=6)
            number = f"{value:.0f}" if value >= 10 else f"{value:.2f}"
            above = value > 1 and way == "nearest"  # so that no two numbers meet
            axes.annotate(
                number, (place + aside, value), (0, 6 if above else -6), textcoords="offset points",
                ha="center", va="bottom" if above else "top", color=colour, fontsize="small",
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.1, 3 * max(share.values()))  # room for the number above
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(SOURCES)), list(SOURCES.values()))
    axes.set_xlim(-0.5, len(SOURCES) - 0.5)
    axes.set_xlabel("where the weights come from")
    axes.set_title(f"SmolLM2-135M, frozen weights, ρ = {rho}", fontsize="medium")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "_static" / "arrival.svg")
    output = parser.parse_args(argv).output
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        training(left)
        frozen(right)
        left.set_ylabel("rise of the loss / rise in float32")
        for axes in (left, right):
            axes.axhline(1, color=GREY, linewidth=0.8, zorder=0)
            axes.spines[["top", "right"]].set_visible(False)
        looks = {"rounded to nearest": (NEAREST, "o"), "rounded stochastically (deltasam)": (STOCHASTIC, "s")}
        handles = [Line2D([], [], color=colour, marker=m, label=name) for name, (colour, m) in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
        is_text = output.suffix == ".svg"
        dated = {"metadata": {"Date": None}} if is_text else {}  # the same file every time
        figure.savefig(output, transparent=is_text, dpi=150, **dated)
    if is_text:  # matplotlib leaves spaces at the ends of lines
        output.write_text("".join(f"{line.rstrip()}\n" for line in output.read_text("utf-8").splitlines()), "utf-8")


if __name__ == "__main__":
    main()
