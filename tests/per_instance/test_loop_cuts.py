"""The loop cuts instances out of their batch; what has the length of the batch by chance is not cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import instance_adversarial_losses
from helpers.instance_reference import gradient_errors, loop, relative
from helpers.problems import grads

N, FEATURES, CLASSES = 5, 4, 5
RHO = 0.1
NOT_ROWS = pytest.mark.filterwarnings("ignore:Cut out of its batch:UserWarning")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        if table is not None:
            x = x + table
        scores = self.query(x) @ self.key(x).mT
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return self.head((scores.softmax(-1) @ x).mean(1))


@dataclass(frozen=True, kw_only=True)
class Weighted(Classification):
    """With weights of the classes, or of the instances, in the batch."""

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        return {name: value for name, value in batch.items() if name in ("x", "mask", "table")}

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        found = outputs.log_softmax(-1) * batch.get("class_weights", 1.0)
        found = -found.gather(1, batch["labels"].unsqueeze(1)).squeeze(1)
        pairs = zip(found, batch.get("instance_weights", [1.0] * len(found)), strict=False)
        return torch.stack([loss * weight for loss, weight in pairs])


BY_CHANCE: dict[str, Callable[[], Any]] = {
    "mask": lambda: torch.ones(N, N).triu(1).bool(), "table": lambda: torch.randn(N, FEATURES).double(),
    "class_weights": lambda: torch.rand(CLASSES).double(),
}  # fmt: skip


def problem(**more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Texts of N tokens, N classes."""
    torch.manual_seed(0)
    model = Attention().double()
    return model, {"x": torch.randn(N, N, FEATURES).double(), "labels": 2 * torch.arange(N) % CLASSES, **more}


def same(model: nn.Module, batch: dict[str, Any], **options: Any) -> None:
    objective = Weighted()
    exact = loop(model, lambda: objective(model, batch), RHO, options.get("group", 1))
    model.zero_grad()
    step = PerInstanceSAM(rho=RHO, engine="loop", **options).backward(model, batch, objective)
    assert step.perturbed_losses is not None
    assert relative(step.perturbed_losses, exact.perturbed) < 1e-9
    assert gradient_errors(grads(model), exact.gradient) < 1e-9


@NOT_ROWS
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", BY_CHANCE)
def test_what_has_the_length_of_the_batch_by_chance_is_whole(name: str, group: int) -> None:
    same(*problem(**{name: BY_CHANCE[name]()}), group=group)


@NOT_ROWS
def test_numbers_of_the_instances_stay_with_them() -> None:
    same(*problem(instance_weights=[0.1, 0.5, 1.0, 2.0, 3.0]))


@NOT_ROWS
@pytest.mark.parametrize("counts", [[0, 1, 2, 1], [2, 0, 0, 2], [1, 1, 1, 1]])
def test_images_of_other_texts(counts: list[int]) -> None:
    """As many images as texts, in order; without its images a text does not pass through the model."""
    texts = torch.arange(4).repeat_interleave(torch.tensor(counts))

    class Captions(nn.Linear):
        def forward(self, x: Tensor, owners: Tensor, images: Tensor) -> Tensor:
            return super().forward(x.index_add(0, owners, images.tanh()))

    torch.manual_seed(0)
    model = Captions(FEATURES, CLASSES).double()
    batch = {
        "x": torch.randn(4, FEATURES).double(), "owners": texts, "images": torch.randn(4, FEATURES).double(),
        "labels": torch.arange(4),
    }  # fmt: skip
    exact = loop(model, lambda: Classification()(model, batch), RHO)
    model.zero_grad()
    step = PerInstanceSAM(rho=RHO, engine="loop").backward(model, batch, Classification())
    assert step.perturbed_losses is not None
    assert relative(step.perturbed_losses, exact.perturbed) < 1e-9
    assert gradient_errors(grads(model), exact.gradient) < 1e-9


def test_running_out_of_memory_is_not_a_wrong_cut() -> None:
    def hungry(model: nn.Module, batch: Any) -> Tensor:
        if len(batch["x"]) < N:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Classification()(model, batch)

    hungry.separable = True  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError):
        PerInstanceSAM(rho=RHO, engine="loop").backward(*problem(), hungry)


@NOT_ROWS
def test_adversarial_losses_use_the_same_loop() -> None:
    model, batch = problem(mask=BY_CHANCE["mask"]())
    objective = Weighted()
    exact = loop(model, lambda: objective(model, batch), RHO)
    worst = instance_adversarial_losses(model, batch, objective, rho=RHO, engine="loop")
    assert relative(worst, exact.perturbed) < 1e-9


def test_one_warning_says_what_is_not_cut() -> None:
    model, batch = problem(mask=BY_CHANCE["mask"]())
    method = PerInstanceSAM(rho=RHO, engine="loop")
    with pytest.warns(UserWarning, match=r"Cut out of its batch.*first dimension.*unsqueeze\(0\)") as found:
        method.backward(model, batch, Weighted())
    assert len(found) == 1
    batch["mask"] = batch["mask"].unsqueeze(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = method.backward(model, batch, Weighted())
    assert step.forwards == 2 * N + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_other_loss(dtype: torch.dtype) -> None:
    model, batch = problem()
    batch = {"x": batch["x"].to(dtype), "labels": batch["labels"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PerInstanceSAM(rho=RHO, engine="loop").backward(model.to(dtype), batch, Classification())
