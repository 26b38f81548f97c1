"""An encoder of base size: scores on four tasks, differences, and adversarial risk."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from deltasam.lab.pages.effects import effect_table, missing, noted, setup_table
from deltasam.lab.pages.evidence import PLAIN, arm_name, clean, evidence
from deltasam.lab.pages.runs import TASKS

KINDS = [arm_name(method) for method in ("ERM", "SAM", "DeltaSAM", "PerInstanceSAM")]
_METRICS = {"score": "metric", "nll": "NLL x 100", "ece": "ECE x 100", "score_4bit": "metric at 4 bits",
            "risk": "adversarial risk"}  # fmt: skip
_MODEL = "all-mpnet-base-v2"


def runs(results: Path) -> pd.DataFrame:
    """The clean runs of the base-size encoder."""
    return clean(evidence(results, "base"))


def setups(frame: pd.DataFrame) -> list[str]:
    """The planned tasks on the model of the runs."""
    model = frame["model"].iloc[0] if len(frame) else _MODEL
    return [f"{TASKS[task]}, {model}" for task in ("mrpc", "rte", "cola", "stsb")]


def scores(results: Path) -> str:
    """Arms by tasks: the metric with its interval."""
    frame = runs(results)
    return noted(setup_table(frame, "score", setups(frame), KINDS), missing(frame, setups(frame), KINDS))


def differences(results: Path) -> str:
    """Arms by tasks: the difference to plain training, paired by seed."""
    frame = runs(results)
    return setup_table(frame, "score", setups(frame), KINDS, to=PLAIN)


def overall(results: Path) -> str:
    """Arms by metrics, over the tasks: difference to plain training. The risk is not times 100."""
    return effect_table(runs(results), _METRICS, KINDS)
