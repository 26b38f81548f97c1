"""``torch.set_default_device``: a step creates its tensors on the host or on the model's device, never elsewhere.

The device ``meta`` plays the GPU. It has no values, so a tensor that is created there by mistake makes the step fail.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import MicroBatches, OwnGradient
from deltasam.lab.catalogue import METHODS
from deltasam.methods import SAM, DeltaSAM, Method
from deltasam.speed.splitting import Splitting
from deltasam.step.fused import Tables
from helpers.problems import TRANSFORMER, grads, relative_error

PERTURBS_EMBEDDINGS = ("FreeLB", "TAT", "TAVAT")
MADE: dict[str, Any] = {name: METHODS[name](embeddings="embeddings") for name in PERTURBS_EMBEDDINGS}
MADE |= {name: METHODS[name]() for name in ("SAM", "DeltaSAM", "PerInstanceSAM", "ASAM", "GSAM", "ESAM", "LookSAM")}
MADE |= {name: METHODS[name]() for name in ("ERM", "SubsetSAM", "FisherSAM")}
MADE |= {"RandomPerturbation": METHODS["RandomPerturbation"](), "BiLoRA": METHODS["BiLoRA"](params="trained", lr=0.1)}
MADE["independent"] = SAM(randomness="independent")
MADE["own gradient"] = DeltaSAM(weighting=OwnGradient())
MADE["loop"] = METHODS["PerInstanceSAM"](engine="loop")
MADE["in parts"] = Splitting(SAM(), largest=2)


@pytest.mark.parametrize("name", MADE)
def test_a_step_is_the_same(name: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        model, batch, objective = TRANSFORMER.make()
        method: Method = deepcopy(MADE[name])
        torch.manual_seed(3)
        with torch.device(device):
            for _ in range(2):
                method.backward(model, batch, objective)
        found.append(grads(model))
    assert relative_error(*found) == 0


def test_a_method_that_has_nothing_to_perturb() -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.unused = nn.Parameter(torch.ones(2))

    model, x = Unused(), torch.ones(4, 2)
    method = METHODS["GSAM"](params=lambda name, p: name == "unused")
    with torch.device("meta"):
        step = method.backward(model, MicroBatches([x, x]), lambda model, x: model(x).squeeze(-1) ** 2)
    assert bool(step.skipped)


def test_the_tables_of_a_recording_are_written_on_the_host() -> None:
    with torch.device("meta"):
        tables = Tables(torch.device("cpu"))
        taken = tables.take([[1, 2], [3, 4]])
    tables.send()
    assert taken is not None
    assert taken.tolist() == [1, 2, 3, 4]
