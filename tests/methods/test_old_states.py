"""States that version 0.1 saved load, and the next step is the one that it computed.

``data/states.pt`` was written by commit 42db881: two steps of each method, its state, and the gradient of a third.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import Classification
from deltasam.methods import ESAM, TAT, TAVAT, DeltaSAM, FisherSAM, LookSAM, Method
from helpers.problems import grads, relative_error

SAVED: dict[str, Any] = torch.load(Path(__file__).parent / "data" / "states.pt", weights_only=True)
METHODS: list[Method] = [
    LookSAM(rho=0.3, k=3), FisherSAM(rho=0.3, keep=0.3, refresh=4), TAT(embeddings="0"), TAVAT(embeddings="0"),
    DeltaSAM(rho=0.3, probe_every=3), ESAM(rho=0.3),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_next_step(method: Method) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    model.load_state_dict(SAVED["weights"])
    saved = SAVED["methods"][type(method).__name__]
    resumed = method.replace(state={})
    resumed.load_state_dict(saved["state"])
    assert resumed.steps == 2
    resumed.backward(model, SAVED["batches"][2], Classification())
    assert relative_error(grads(model), saved["gradients"]) < 1e-6
    if method.buffers:  # the comparison can fail
        model.zero_grad()
        afresh = method.replace(state={})
        afresh.load_state_dict({"steps": 2})
        afresh.backward(model, SAVED["batches"][2], Classification())
        assert relative_error(grads(model), saved["gradients"]) > 1e-4
