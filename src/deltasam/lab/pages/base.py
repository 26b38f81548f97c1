"""An encoder of base size: scores on four tasks, differences, and adversarial risk."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from deltasam.lab.pages.effects import effect_table, missing, noted, setup_table
from deltasam.lab.pages.evidence import PLAIN, arm_name, clean, topic
from deltasam.lab.pages.plan import cells

KINDS = [arm_name(method) for method in ("ERM", "SAM", "DeltaSAM", "PerInstanceSAM")]
_METRICS = {"score": "metric", "nll": "NLL x 100", "ece": "ECE x 100", "score_4bit": "metric at 4 bits",
            "risk": "adversarial risk"}  # fmt: skip


def runs(results: Path) -> pd.DataFrame:
    """The clean runs of the base-size encoder."""
    return clean(topic(results, "base"))


def scores(results: Path) -> str:
    """Arms by tasks: the metric with its interval."""
    planned = cells(results, "base")
    return noted(setup_table(runs(results), "score", planned["setup"].unique(), KINDS), missing(planned))


def differences(results: Path) -> str:
    """Arms by tasks: the difference to plain training, paired by seed."""
    return setup_table(runs(results), "score", cells(results, "base")["setup"].unique(), KINDS, to=PLAIN)


def overall(results: Path) -> str:
    """Arms by metrics, over the tasks: difference to plain training. The risk is not times 100."""
    return effect_table(runs(results), _METRICS, KINDS)
