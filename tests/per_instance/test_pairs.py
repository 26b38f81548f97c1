"""Objectives that call the model with two rows per loss: the pair is the instance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from deltasam import ESAM, SAM, Objective, PerInstanceSAM, SubsetSAM
from deltasam.methods import Method
from deltasam.per_instance import instance_gradient_norms

pytest.importorskip("peft")
pytest.importorskip("datasets")

from helpers.preferences import lora, pairs


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log-probabilities of the answers, (2N,)."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    found = logits.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return (found * batch["completion_mask"][:, 1:]).sum(1)


def halves(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """TRL's order: first all chosen answers, then all rejected ones."""
    chosen, rejected = scores(model, batch).chunk(2)
    return -logsigmoid(0.5 * (chosen - rejected))


def neighbours(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A chosen answer and its rejected one are adjacent."""
    found = scores(model, batch)
    return -logsigmoid(0.5 * (found[0::2] - found[1::2]))


def joined(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The batch has N rows; the objective joins its two parts."""
    return halves(model, {name: torch.cat([batch["first"][name], batch["second"][name]]) for name in batch["first"]})


class Pairs(Objective):
    """The same as an objective, whose losses are separable."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return halves(model, batch)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError

    losses = divergence = forward


def batches(objective: Any) -> dict[str, Any]:
    batch: dict[str, Any] = pairs(5)
    if objective is joined:
        return {"first": {n: v[:5] for n, v in batch.items()}, "second": {n: v[5:] for n, v in batch.items()}}
    return batch


@pytest.mark.parametrize(
    "objective", [halves, neighbours, joined, Pairs()], ids=["halves", "adjacent", "joined", "kind"]
)
def test_low_rank_equals_the_loop(objective: Any) -> None:
    """Llama's norms compute in float32, also in a float64 model."""
    model, batch = lora().double(), batches(objective)
    results = []
    for engine in ("auto", "loop"):
        model.zero_grad()
        step = PerInstanceSAM(rho=0.2, engine=engine).backward(model, batch, objective)
        results.append((step.perturbed_losses, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
        assert step.losses.shape == (5,)
        assert step.forwards == (2 if engine == "auto" else 11)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    norms = [instance_gradient_norms(model, batch, objective, engine=engine) for engine in ("low-rank", "loop")]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=1e-8)


def test_the_number_of_instances_is_found_once() -> None:
    model, batch, calls = lora().double(), pairs(5), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_pre_hook(count)
    method = PerInstanceSAM(rho=0.2)
    method.backward(model, batch, halves)
    calls = 0
    method.backward(model, pairs(3), halves)
    assert calls == 2, "no pass with the wrong number"


@pytest.mark.parametrize("method", [ESAM(), SubsetSAM(rho=0.1)], ids=lambda method: type(method).__name__)
def test_methods_that_take_instances_name_the_remedy(method: Method) -> None:
    with pytest.raises(ValueError, match=r"prepare_batch\(model, batch\).*one row per instance"):
        method.backward(lora().double(), pairs(5), neighbours)
    assert SAM(rho=0.1).backward(lora().double(), pairs(5), neighbours).losses.shape == (5,)
