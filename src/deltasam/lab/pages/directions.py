"""The instance's own direction or noise: per-instance perturbation against groups and against random directions."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from deltasam.lab.pages.effects import effect_table, missing, noted
from deltasam.lab.pages.evidence import PLAIN, arm_name, clean, evidence, with_arms
from deltasam.lab.pages.plan import cells
from deltasam.lab.pages.rounding import with_drops

OWN, NOISE = arm_name("PerInstanceSAM"), arm_name("RandomPerturbation")
KINDS = (OWN, NOISE, arm_name("SAM"), PLAIN)
_METRICS = {"score": "metric", "nll": "NLL x 100", "ece": "ECE x 100", "nll_scaled": "NLL x 100, scaled",
            "drop_4bit": "lost at 4 bits"}  # fmt: skip


def runs(results: Path) -> pd.DataFrame:
    """The clean runs of these kinds at the radius of the runs with groups, on the setups that have such runs."""
    frame = with_drops(clean(evidence(results, "pays-groups", "pays")))
    grouped = frame[(frame["kind"] == OWN) & (frame["group"] > 1)]
    shown = frame["kind"].isin(KINDS) & frame["setup"].isin(grouped["setup"])
    return with_arms(frame[shown & (frame["rho"].isin(grouped["rho"]) | (frame["kind"] == PLAIN))])


def own(frame: pd.DataFrame) -> str:
    """The arm in which every instance has its own perturbation."""
    found = frame[(frame["kind"] == OWN) & (frame["group"] == 1)]["arm"]
    return str(found.iloc[0]) if len(found) else OWN


def differences(results: Path) -> str:
    """Arms by metrics: what is lost or gained if instances share a perturbation, or if its direction is random."""
    frame = runs(results)
    return noted(
        effect_table(frame, _METRICS, KINDS, second=own(frame)), missing(cells(results, "pays-groups", "pays"))
    )
