"""Writes docs/results.md from the runs in results/: what was measured again, beside the paper's figures.

Reads result.json files alone, needs no torch. A section appears when its results are there; the sentences that
interpret figures are in results_reading.py.

    python benchmarks/results_page.py
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
PLOTS = PAGE.parent / "_static" / "results"
RESULTS = ROOT / "results"
SWEEPS = ROOT / "configs" / "sweeps" / "evidence"

GO_ON = """Each goes on where it stopped: `deltasam sweep configs/sweeps/evidence/glue.yaml --output results/glue`
makes the runs that are missing."""

UNTIMED = """- Running times of undisturbed runs (`deltasam bench train`; the runs above shared the GPU, so their
  times say nothing)."""


def part(name: str) -> dict[str, Any]:
    """A script of this folder."""
    return runpy.run_path(str(ROOT / "benchmarks" / f"results_{name}.py"))


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    text, glue, chosen, other = part("reading"), part("glue"), part("chosen"), part("other")
    sections = [
        (part("risk")["risk_section"](results), text["RISK_READING"]),
        (part("weights")["weights_section"](results), ""),
        (part("weights_second")["second_task_section"](results), text["SECOND_TASK_READING"]),
        (part("weights_second")["base_section"](results), text["BASE_READING"]),
        (part("labels")["labels_section"](results), text["LABELS_READING"]),
        (part("eta")["eta_section"](results), text["ETA_READING"]),
        (glue["tuning_section"](results), ""),
        (glue["glue_section"](results), text["GLUE_READING"]),
        (part("eta_chosen")["eta_section"](results), text["ETA_CHOSEN_READING"]),
        (part("radius")["radius_section"](results), text["RADIUS_READING"]),
        (glue["second_encoder_section"](results), text["SECOND_ENCODER_READING"]),
        (chosen["second_encoder_section"](results), text["SECOND_CHOSEN_READING"]),
        (glue["larger_section"](results), text["LARGER_READING"]),
        (chosen["larger_section"](results), text["LARGER_CHOSEN_READING"]),
        (glue["second_larger_section"](results), text["SECOND_LARGER_READING"]),
        (part("pooled")["pooled_section"](results), text["POOLED_READING"]),
        (other["sts_section"](results), text["STS_READING"]),
        (other["summarization_section"](results), text["SUMMARIZATION_READING"]),
        (part("times")["times_section"](results), text["TIMES_READING"]),
        (glue["learning_rates"](results), ""),
        (part("intervals")["intervals_section"](results), text["INTERVALS_READING"]),
    ]
    # A sentence about results that are not there is not shown.
    shown = [each.strip() for found, said in sections if found for each in (found, said) if each]
    conclusion = [text["CONCLUSION"].strip()] if shown and text["CONCLUSION"] else []
    blocks = [text["INTRODUCTION"].strip(), *conclusion, *shown, missing(results, text["MISSING"])]
    return "\n\n".join(blocks) + "\n"


def plots(results: Path = RESULTS) -> dict[str, str]:
    """All plots of the page, by the names of their files."""
    return {
        "weights.svg": part("weights")["plot"](results),
        **part("glue")["plots"](results),
        **part("radius")["plots"](results),
        **part("pooled")["plots"](results),
    }


def missing(results: Path, by_hand: str) -> str:
    """What was planned and is not there: the runs of the sweeps, counted, and the rest by hand."""
    lines = part("missing")["lines"](results, SWEEPS)
    timed = any((results / "times").glob("*.json"))
    parts = ["## Not measured yet", "\n".join(filter(None, [*lines, by_hand.strip(), "" if timed else UNTIMED]))]
    return "\n\n".join([*parts, *([GO_ON] if lines else [])])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PLOTS.mkdir(exist_ok=True)
    for name, drawn in plots().items():
        (PLOTS / name).write_text(drawn, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
