"""Objectives and models that take the batch apart or change it: only methods with several passes notice."""

from __future__ import annotations

import warnings
from collections import UserDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import (
    ERM,
    ESAM,
    GSAM,
    SAM,
    DeltaSAM,
    Directional,
    LookSAM,
    Method,
    MicroBatches,
    OwnGradient,
    PerInstanceSAM,
    SubsetSAM,
)
from helpers.problems import grads, relative_error

METHODS = [SAM(), DeltaSAM(), DeltaSAM(weighting=Directional()), DeltaSAM(weighting=OwnGradient()), GSAM(), LookSAM()]
METHODS += [ESAM(), SubsetSAM(), PerInstanceSAM(), PerInstanceSAM(engine="loop")]


def popping(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return (model(batch["x"]).squeeze(-1) - labels) ** 2


def reading(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]).squeeze(-1) - batch["labels"]) ** 2


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_an_objective_may_take_the_labels_out_of_the_batch(method: Method, kind: type) -> None:
    model, found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), []
    values = {"x": torch.randn(6, 3), "labels": torch.randn(6)}
    for objective in (popping, reading):
        model.zero_grad()
        batch = kind(values)
        deepcopy(method).backward(model, batch, objective)
        found.append(grads(model))
        assert set(batch) == {"x", "labels"}
    assert relative_error(*found) < 1e-6


def test_several_batches_and_a_list() -> None:
    model, x = nn.Linear(3, 1), torch.randn(6, 3)
    parts = MicroBatches([{"x": x[:3], "labels": x[:3, 0]}, {"x": x[3:], "labels": x[3:, 0]}])
    SAM().backward(model, parts, popping)
    SAM().backward(model, [x, x[:, 0]], lambda model, batch: (model(batch.pop(0)).squeeze(-1) - batch.pop()) ** 2)


class Normalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.sub_(1.0).mul_(2.0)).squeeze(-1)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) ** 2


@pytest.mark.parametrize("method", [SAM(), DeltaSAM(), PerInstanceSAM()], ids=lambda m: type(m).__name__)
def test_a_batch_that_is_changed_in_place_warns(method: Method) -> None:
    with pytest.warns(UserWarning, match=r"changed the batch in place.*clone"):
        method.backward(Normalises(), torch.randn(5, 3), squares)


def test_no_warning_with_one_pass_or_without_a_change() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ERM().backward(Normalises(), torch.randn(5, 3), squares)
        with torch.inference_mode():
            labels = torch.randn(5)
        batch = {"x": torch.randn(5, 3), "labels": labels}
        SAM().backward(nn.Linear(3, 1), batch, lambda m, b: m(b["x"]).squeeze(-1) * (b["labels"] > 0).clone())
