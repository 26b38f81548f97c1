"""Output gradients in bfloat16: they take less memory and round the direction of the perturbation, nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam import PerInstanceSAM
from deltasam.lab.bench._memory import peak_bytes
from deltasam.per_instance import Recording, record
from deltasam.per_instance.algebra.factors import LowRank
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.step.float32 import rounds_products
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import loop, relative

CPU = torch.device("cpu")
UNIT = 2.0**-8  # the largest relative error of one number rounded to the eight binary digits of bfloat16


def low_rank(gradients: InstanceGradients) -> Iterator[LowRank]:
    for found in gradients.factors.values():
        yield from (factor for factor in found if isinstance(factor, LowRank))


def written_out(gradients: InstanceGradients, *, absolute: bool = False) -> Tensor:
    """``d^T x`` of all low-rank factors in float64, of the absolute values if wanted."""
    pairs = [(f.d.double(), f.x.double()) for f in low_rank(gradients)]
    pairs = [(d.abs(), x.abs()) for d, x in pairs] if absolute else pairs
    return torch.cat([(d.mT @ x).flatten() for d, x in pairs])


def pass_at(model: nn.Module, run: Any, recording: Recording, rho: float) -> tuple[Tensor, Tensor]:
    """Losses and gradient at the perturbed weights."""
    model.zero_grad()
    with recording.perturbed(rho / recording.norms):
        losses = run()
        losses.mean().backward()
    return losses.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5", "BERT with LoRA (peft)"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_rounding_is_that_of_bfloat16(name: str, size: int) -> None:
    rho = 0.02
    model, run, _ = make(BY_NAME[name], size)
    model.float()
    exact = record(model, run)
    rounded = exact.rounded()
    assert rounded.norms is exact.norms
    for a, b in zip(low_rank(exact.gradients), low_rank(rounded.gradients), strict=True):
        assert b.x is a.x
        assert (b.x.dtype, b.d.dtype) == (torch.float32, torch.bfloat16)
    found, wanted = written_out(rounded.gradients), written_out(exact.gradients)
    # Every number of d is off by at most UNIT. On the whole that is the error of d^T x; where terms cancel it is more.
    assert ((found - wanted).abs() <= UNIT * written_out(exact.gradients, absolute=True)).all()
    assert 0 < relative(found, wanted) < UNIT
    wanted, gradient = pass_at(model, run, exact, rho)
    found, ours = pass_at(model, run, rounded, rho)
    # Relative to the change that the perturbation makes, which is small. The product is rounded as well as d, and so
    # is the gradient that flows back through it.
    assert relative(found - exact.losses, wanted - exact.losses) < 2 * UNIT
    model.zero_grad()
    run().mean().backward()
    at_w = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (ours - gradient).norm() < 2 * UNIT * (gradient - at_w).norm()


def test_against_the_loop_in_float64() -> None:
    model, run, _ = make(BY_NAME["BERT"], 3)
    exact = loop(model, run, 0.02)
    model.float()
    recording = record(model, run).rounded()
    losses, _ = pass_at(model, run, recording, 0.02)
    assert relative(recording.norms.double(), exact.norms) < 1e-5  # rounding of float32, not of bfloat16
    assert relative((losses - recording.losses).double(), exact.perturbed - exact.losses) < 2 * UNIT


def test_float64_is_left_alone() -> None:
    model, run, _ = make(BY_NAME["BERT"], 2)
    assert all(factor.d.dtype is torch.float64 for factor in low_rank(record(model, run).rounded().gradients))


class Wide(nn.Module):
    """Linear layers only: the tensors kept between the passes are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean((1, 2))


def call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def test_the_graph_of_the_second_pass_holds_no_wide_copy() -> None:
    model, x = Wide(), torch.randn(16, 32, 256)  # large enough for the peak to be where the graph is, not the gradient

    def peak(factors: Any) -> int:
        method = PerInstanceSAM(rho=0.05, factors=factors)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            method.backward(model, x, call)
        model.zero_grad(set_to_none=True)
        return peak_bytes(lambda: method.backward(model, x, call), CPU)

    layer = x.numel() * 4  # bytes of one layer's output gradients in float32; half of eight of them is saved
    assert peak("exact") - peak("bfloat16") > 3 * layer


def test_unrounded_gradients_are_freed_before_the_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    norms = InstanceGradients.norms

    def watched(self: InstanceGradients) -> Tensor:
        seen.extend(weakref.ref(factor.d) for factor in low_rank(self))
        return norms(self)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        alive.append(len({id(ref()) for ref in seen if ref() is not None}))
        return model(x)

    monkeypatch.setattr(InstanceGradients, "norms", watched)
    model, x = Wide(), torch.randn(2, 8, 256)
    for factors, expected in (("exact", 8), ("bfloat16", 0)):
        PerInstanceSAM(factors=factors).backward(model, x, objective)
        assert len(seen) >= 8
        assert alive[-1] == expected
        seen.clear()


class Both(nn.Module):
    """A weight used as it is, transposed and as a table: its low-rank factors are multiplied with every other form."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 20)
        self.weight = nn.Parameter(torch.randn(20, 20) / 4)
        self.last = nn.Linear(20, 20)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(self.table(ids), self.weight))
        hidden = torch.tanh(hidden @ self.weight)
        return (self.last(hidden) @ self.table.weight.T).square().mean((1, 2))


def gradient_of(method: PerInstanceSAM, model: nn.Module, x: Any, objective: Any = call) -> tuple[Any, Tensor]:
    model.zero_grad()
    step = method.backward(model, x, objective)
    return step, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("group", [1, 2])
def test_a_weight_used_in_several_ways(group: int) -> None:
    torch.manual_seed(0)
    model, ids = Both(), torch.randint(24, (5, 3))
    methods = [PerInstanceSAM(rho=0.05, group=group, factors=factors) for factors in ("exact", "bfloat16")]
    (step, wanted), (other, found) = (gradient_of(method, model, ids) for method in methods)
    assert torch.equal(step.grad_norm, other.grad_norm)
    assert torch.equal(step.losses, other.losses)
    assert 0 < relative(other.perturbed_losses - other.losses, step.perturbed_losses - step.losses) < 2 * UNIT
    assert relative(found, wanted) < UNIT  # much less of the gradient than of the perturbation


def test_an_instance_without_a_finite_gradient_takes_its_plain_gradient() -> None:
    torch.manual_seed(0)
    model, x, passes = Wide(), torch.randn(3, 4, 256), 0

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        losses = model(x)
        if passes == 1:  # of a step: the one at w
            losses.register_hook(lambda grad: grad * torch.tensor([1.0, float("inf"), 1.0]))
        return losses

    for factors in ("exact", "bfloat16"):
        passes = 0
        step, gradient = gradient_of(PerInstanceSAM(rho=0.5, factors=factors), model, x, objective)
        risen = step.perturbed_losses - step.losses
        assert torch.isfinite(gradient).all()
        assert (float(risen[1]), bool(risen[0] > 0), bool(risen[2] > 0)) == (pytest.approx(0, abs=1e-6), True, True)


@pytest.mark.parametrize("rounds", [False, True])
def test_auto_rounds_under_tf32_and_only_where_a_layer_widens(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PerInstanceSAM().factors == "auto"
    monkeypatch.setattr("deltasam.methods._per_instance_sam.rounds_products", lambda device: rounds)
    found: dict[tuple[int, int], torch.dtype] = {}
    perturbed = Recording.perturbed

    def watched(self: Recording, c: Tensor) -> Any:
        found.update({(f.x.shape[2], f.d.shape[2]): f.d.dtype for f in low_rank(self.gradients)})
        return perturbed(self, c)

    monkeypatch.setattr(Recording, "perturbed", watched)
    layers = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64), nn.Linear(64, 64))
    PerInstanceSAM().backward(layers, torch.randn(2, 8, 64), lambda model, x: model(x).square().mean((1, 2)))
    wide = torch.bfloat16 if rounds else torch.float32
    assert found == {(64, 128): wide, (128, 128): torch.float32, (128, 64): torch.float32, (64, 64): torch.float32}


def test_products_are_rounded_by_tf32_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, before = torch.device("cuda"), torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    try:
        for setting, rounds in (("highest", False), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(setting)
            assert rounds_products(gpu) is rounds
            assert not rounds_products(CPU)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
                assert rounds_products(gpu) is rounds
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not rounds_products(gpu)
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # has no TF32
        assert not rounds_products(gpu)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has only one setting for TF32")
def test_the_newer_setting_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is used, torch refuses the older one."""
    gpu, products = torch.device("cuda"), torch.backends.cuda.matmul
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        assert rounds_products(gpu)
        assert products.fp32_precision == "tf32"
        products.fp32_precision = "ieee"
        assert not rounds_products(gpu)
    finally:
        products.fp32_precision = before


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="factors='half' must be one of"):
        PerInstanceSAM(factors="half")  # type: ignore[arg-type]
