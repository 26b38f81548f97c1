"""Per-instance SAM over long texts on a CUDA device: one matrix per instance, rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import LowRank, record
from deltasam.speed.capture import Captured
from deltasam.step.float32 import float32_kept

pytestmark = pytest.mark.gpu
N, T, RHO = 4, 512, 0.02


@pytest.fixture(params=["bf16", "TF32", "float32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    with float32_kept():
        torch.set_float32_matmul_precision("high" if request.param == "TF32" else "highest")
        yield request.param


def autocast(precision: str) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def problem() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=T,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).cuda().train()
    ids = torch.randint(5, 97, (N, T), device="cuda")
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def taken(method: Any, model: nn.Module, batch: Any, precision: str, steps: int = 1) -> tuple[Tensor, Tensor]:
    for _ in range(steps):
        model.zero_grad()
        with autocast(precision):
            step = method.backward(model, batch, Classification())
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return step.perturbed_losses.float() - step.losses.float(), gradient


def test_the_layers_are_written_out(precision: str) -> None:
    model, batch = problem()
    with autocast(precision):
        found = record(model, lambda: Classification()(model, batch)).gradients.factors
    layers = [m for m in model.bert.encoder.modules() if isinstance(m, nn.Linear)]
    assert not any(isinstance(f, LowRank) for layer in layers for f in found[id(layer.weight)])


def test_the_perturbation_arrives(precision: str) -> None:
    """Compared with the loop in float64."""
    model, batch = problem()
    risen, gradient = taken(PerInstanceSAM(rho=RHO), model, batch, precision)
    wanted, exact = taken(PerInstanceSAM(rho=RHO, engine="loop"), model.double(), batch, "float64")
    tolerance = {"bf16": 0.1, "TF32": 0.02, "float32": 1e-3}[precision]
    assert float(risen.mean()) == pytest.approx(float(wanted.mean()), rel=tolerance)
    assert float(nn.functional.cosine_similarity(gradient.double(), exact, dim=0)) > 1 - tolerance / 10


def test_a_captured_step_is_the_eager_one(precision: str) -> None:
    model, batch = problem()
    eager = taken(PerInstanceSAM(rho=RHO), model, batch, precision)
    method = Captured(PerInstanceSAM(rho=RHO))
    captured = taken(method, model, batch, precision, steps=4)
    assert (method.report.obstacles, method.report.replayed) == ({}, 3)
    for mine, other in zip(captured, eager, strict=True):
        assert (mine - other).norm() < {"bf16": 2e-2, "TF32": 5e-3, "float32": 1e-4}[precision] * other.norm()


def test_a_bound_on_memory_is_kept(precision: str) -> None:
    model, batch = problem()
    taken(PerInstanceSAM(rho=RHO), model, batch, precision, steps=2)  # compares with autograd, compiles

    def peak(**options: Any) -> int:
        method = PerInstanceSAM(rho=RHO, **options)
        taken(method, model, batch, precision)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken(method, model, batch, precision)
        return torch.cuda.max_memory_allocated() - before

    matrices = sum(m.weight.numel() for m in model.bert.encoder.modules() if isinstance(m, nn.Linear))
    assert peak(max_extra_memory=2**34) <= 1.25 * peak() + N * matrices * 4
