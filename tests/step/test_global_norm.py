"""The global norm, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ASAM, ERM, ESAM, GSAM, SAM, DeltaSAM, FisherSAM, LookSAM, Method
from deltasam.step.norms import dot, global_norm, step_size
from deltasam.weighting import Directional, OwnGradient


def exact(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


@pytest.mark.parametrize("shape", [(2**23,), (2**15, 2**8), (2**4, 2**19)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_many_entries_are_added_precisely(shape: tuple[int, ...], transposed: bool) -> None:
    """On a CPU the error of torch's norm of so many float32 numbers is 6e-4: it adds them one after the other."""
    table = torch.randn(shape)
    found = [table.mT if transposed and table.ndim > 1 else table, torch.randn(3, 2)]
    for tensors in (found, found[:1]):
        assert float(abs(global_norm(tensors) / exact(tensors) - 1)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_scalars_and_empty_tensors(dtype: torch.dtype) -> None:
    tensors = [torch.randn(300, 400).to(dtype), torch.tensor(3.0, dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    found = global_norm(tensors)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert float(found) == pytest.approx(float(exact(tensors)), rel=1e-5)


def test_the_norm_of_values_that_are_not_finite() -> None:
    tensors = [torch.randn(2**18), torch.randn(4)]
    tensors[0][-1] = float("inf")
    assert not torch.isfinite(global_norm(tensors))
    tensors[0][-1] = float("nan")
    assert not torch.isfinite(global_norm(tensors))


KINDS = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("size", [3, 2**17])
def test_dtypes_may_differ(first: torch.dtype, second: torch.dtype, size: int) -> None:
    tensors = [torch.randn(size).to(first), torch.randn(4).to(second)]
    found = global_norm(tensors)
    assert found.dtype is torch.promote_types(torch.promote_types(first, second), torch.float32)
    assert float(found) == pytest.approx(float(exact(tensors)), rel=1e-5)
    other = [torch.randn(size).to(second), torch.randn(4).to(first)]
    wanted = sum((a.double() * b.double()).sum() for a, b in zip(tensors, other, strict=True))
    assert float(dot(tensors, other)) == pytest.approx(float(wanted), rel=1e-5, abs=1e-2)
    assert dot(tensors, other).dtype is found.dtype


class Mixed(nn.Module):
    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3).to(first), nn.Linear(3, 1).to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.to(self.a.weight.dtype)).to(self.b.weight.dtype)).squeeze(-1).float()


METHODS: dict[str, Callable[[], Method]] = {
    "sam": SAM,
    "delta-sam": DeltaSAM,
    "directional": lambda: DeltaSAM(weighting=Directional()),
    "own-gradient": lambda: DeltaSAM(weighting=OwnGradient()),
    "gsam": GSAM,
    "look-sam": LookSAM,
    "asam": ASAM,
    "fisher-sam": FisherSAM,
    "esam": lambda: ESAM(beta=1.0),
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[1::-1], KINDS[:0:-1]], ids=str)
@pytest.mark.filterwarnings("ignore:the weights are torch.bfloat16")
def test_models_of_several_dtypes(make: Callable[[], Method], kinds: list[torch.dtype]) -> None:
    step = make().backward(Mixed(*kinds), torch.randn(4, 3), lambda model, x: model(x) ** 2)
    assert torch.isfinite(step.grad_norm)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.w).abs() ** 2 + self.b**2


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_complex_parameters_are_refused(make: Callable[[], Method]) -> None:
    with pytest.raises(TypeError, match=r"'w' is complex.*params="):
        make().backward(Complex(), torch.randn(4, 3), lambda model, x: model(x))


@pytest.mark.parametrize(
    "method", [ERM(), SAM(rho=0.0), SAM(params=lambda name, p: not p.is_complex())], ids=["erm", "rho=0", "real"]
)
def test_complex_parameters_that_stay_at_w_are_trained(method: Method) -> None:
    model = Complex()
    method.backward(model, torch.randn(4, 3), lambda model, x: model(x))
    assert model.w.grad is not None


def test_the_state_of_look_sam_follows_the_dtype_of_the_model() -> None:
    model, method = nn.Linear(3, 1), LookSAM(k=3)
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        model.zero_grad()
        method.backward(model, torch.randn(4, 3, dtype=dtype), lambda model, x: model(x).squeeze(-1) ** 2)
        assert all(p.grad.dtype is dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_is_too_small_to_divide_by_gives_a_zero_step(dtype: torch.dtype) -> None:
    """rho over the smallest float would be infinite, and so would the weights."""
    smallest = torch.tensor(5e-324 if dtype is torch.float64 else 1e-45, dtype=dtype)
    assert smallest > 0
    for norm in (smallest, torch.zeros_like(smallest), smallest / 0, torch.full_like(smallest, float("nan"))):
        assert float(step_size(0.05, norm)) == 0
    usable = torch.full_like(smallest, 1e-30)
    assert float(step_size(0.05, usable)) == pytest.approx(0.05 / 1e-30)
