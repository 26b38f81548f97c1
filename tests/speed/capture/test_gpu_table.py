"""Every capturable method is captured on every architecture, in float32 and under autocast, on a GPU.

``test_taped.py`` runs the same comparisons on the CPU, with a simulated graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltasam.methods import SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.weighting import FiniteDifference
from helpers.captured_models import CAPTURABLE, CASES, Case, batch, compare, smol, to, trajectory
from helpers.rows import Row

pytestmark = pytest.mark.gpu

STEPS = 50
METHODS: dict[str, Callable[[], Method]] = {
    "sam": lambda: SAM(rho=0.2),
    "per-instance": lambda: PerInstanceSAM(rho=0.2),
    "delta-sam": lambda: DeltaSAM(rho=0.2, weighting=FiniteDifference(radius=20.0)),  # above rounding, at this size
}


# The random rounding of perturbed weights changes which instances ESAM keeps, and the small difference that LookSAM
# reuses.
EXACT_ONLY = ("esam", "look-sam")
TABLE = [(row, bf16) for row in CAPTURABLE for bf16 in (False, True) if not (bf16 and row.name in EXACT_ONLY)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("row", "bf16"), TABLE, ids=[f"{row}-{'bf16' if bf16 else 'fp32'}" for row, bf16 in TABLE])
def test_captured_equals_ordinary(row: Row, case: Case, bf16: bool) -> None:
    compare(case, row, "cuda", bf16=bf16).check(case.tolerance(row, bf16=bf16))


@pytest.mark.parametrize(
    ("name", "bf16"), [("sam", False), ("sam", True), ("per-instance", False), ("delta-sam", False)]
)
def test_trajectories_at_the_size_of_smollm2(name: str, bf16: bool) -> None:
    data: list[Any] = [to(batch(8, 32, 49152, tokens=True, seed=k % 4), "cuda") for k in range(STEPS)]
    found = []
    for capture in (True, False):
        model = smol("cuda")
        # a large eps: otherwise Adam turns gradients that are rounding noise into full steps
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-6, capturable=True, fused=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            found.append(trajectory(METHODS[name](), model, optimizer, data, capture=capture))
        del model, optimizer
    captured, ordinary = found
    captured.check(ordinary, 0.05 if bf16 else 0.02)
