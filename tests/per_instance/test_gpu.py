"""Per-instance SAM with TF32 on a CUDA device: what is rounded by default, and how much memory that saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.lab.bench._memory import peak_bytes
from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.speed.capture import Captured
from deltasam.step.float32 import float32_kept, rounds_products

pytestmark = pytest.mark.gpu
WAYS: dict[str, Callable[[Any], Any]] = {"eager": lambda method: method, "captured": Captured}


@pytest.fixture(autouse=True)
def _with_tf32() -> Iterator[None]:
    with float32_kept():
        torch.set_float32_matmul_precision("high")
        yield


def problem() -> tuple[nn.Module, dict[str, Tensor]]:
    """Wide enough for low rank to pay in every layer; no dropout, so that two ways are the same step."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).cuda().train()
    ids = torch.randint(5, 97, (16, 64), device="cuda")
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


@pytest.mark.parametrize("way", WAYS)
def test_the_default_is_close_to_exact(way: str) -> None:
    """To 1% of the gradient, and of what the perturbation does to the losses."""
    model, batch = problem()
    assert rounds_products(torch.device("cuda"))
    gradients, risen = [], []
    for method in (PerInstanceSAM(rho=0.05, factors="exact"), PerInstanceSAM(rho=0.05)):
        taken = WAYS[way](method)
        for _ in range(4):  # a captured step is ordinary, then recorded, then replayed
            model.zero_grad()
            step = taken.backward(model, batch, Classification())
        if way == "captured":
            assert (taken.report.obstacles, taken.report.replayed) == ({}, 3)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        risen.append(step.perturbed_losses - step.losses)
    for exact, ours in (gradients, risen):
        assert not torch.equal(exact, ours)
        assert (ours - exact).norm() < 1e-2 * exact.norm()


def test_without_tf32_the_default_is_exact() -> None:
    torch.set_float32_matmul_precision("highest")
    model, batch = problem()
    risen = []
    for method in (PerInstanceSAM(rho=0.05, factors="exact"), PerInstanceSAM(rho=0.05)):
        step = method.backward(model, batch, Classification())
        risen.append(step.perturbed_losses - step.losses)
    assert torch.allclose(*risen, rtol=1e-4, atol=1e-6)


def test_the_default_takes_less_memory() -> None:
    model, batch = problem()

    def peak(method: PerInstanceSAM) -> int:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

        def work() -> Callable[[], Any]:
            for _ in range(3):
                method.backward(model, batch, Classification())
            return lambda: method.backward(model, batch, Classification())

        PerInstanceSAM().backward(model, batch, Classification())  # the engine compares with autograd once
        return peak_bytes(work, torch.device("cuda"))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > m.in_features]
    kept = 16 * 64 * sum(m.out_features for m in layers) * 4  # bytes of their output gradients; half of them is saved
    assert peak(PerInstanceSAM(factors="exact")) - peak(PerInstanceSAM()) > kept / 4
