"""The perturbed pass is compared with moved weights, which finds what the gradient at w cannot show."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import UncoveredError, record
from helpers.instance_reference import relative


def results(model: nn.Module, batch: Any, objective: Any, rho: float, engine: str) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = PerInstanceSAM(rho=rho, engine=engine).backward(model, batch, objective)  # type: ignore[arg-type]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads]), step.perturbed_losses


def assert_as_the_loop(model: nn.Module, batch: Any, objective: Any, rho: float = 0.5, engine: str = "auto") -> None:
    mine, exact = (results(model, batch, objective, rho, e) for e in (engine, "loop"))
    assert relative(mine[0], exact[0]) < 1e-9
    assert relative(mine[1], exact[1]) < 1e-9


class Scaled(nn.Module):
    """A weight divided by its norm, which takes no gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.out, self.how = nn.Linear(3, 3), nn.Linear(3, 1), how

    def forward(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        if self.how == "data":
            norm = w.data.norm()
        elif self.how == "detach":
            norm = w.detach().norm()
        else:
            with torch.no_grad():
                norm = w.norm()
        return self.out(torch.tanh(F.linear(x, w / norm, self.layer.bias)))


def to_one(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - 1) ** 2


@pytest.mark.parametrize("how", ["data", "detach", "no_grad"])
def test_a_norm_without_a_gradient_follows_the_perturbation(how: str) -> None:
    assert_as_the_loop(Scaled(how).double(), torch.randn(4, 3).double(), to_one, engine="low-rank")


class Hidden(nn.Module):
    """Reads the weight in a way that bypasses the proxies and autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 3), nn.Linear(3, 1)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x) / self.held[0].detach().norm()))


def test_a_value_that_does_not_follow_the_perturbation_is_found() -> None:
    x = torch.randn(4, 3).double()
    with pytest.warns(UserWarning, match="differ from those at moved weights"):
        PerInstanceSAM(rho=0.5).backward(Hidden().double(), x, to_one)
    assert_as_the_loop(Hidden().double(), x, to_one)
    model = Hidden().double()
    with pytest.raises(UncoveredError, match="bypasses the engine"):
        record(model, lambda: to_one(model, x))


class DetachedTable(nn.Module):
    """As PEFT's DoRA: the norm of a product of layers, which are called with a unit matrix and without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        change = self.up(self.down(torch.eye(8, dtype=h.dtype))).detach()
        return self.out(torch.tanh((h + self.up(self.down(h))) / change.norm(dim=0)).mean(1))


@pytest.mark.parametrize("n", [3, 4, 8])
def test_a_layer_called_with_a_unit_matrix_and_with_the_batch(n: int) -> None:
    batch = (torch.randint(11, (n, 5)), torch.randint(3, (n,)))
    assert_as_the_loop(DetachedTable().double(), batch, Classification(), engine="low-rank")


def test_layers_without_a_graph_between_others() -> None:
    class Both(nn.Module):
        """Uses inputs and parameters with and without a graph: values of the one must not be reused for the other."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4)
            self.scale, self.out = nn.Parameter(torch.rand(4)), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            with torch.no_grad():
                gate = torch.sigmoid(self.layer(h) + self.norm(h) * self.scale)
            return self.out(self.layer(h) * gate + self.norm(h) * self.scale).mean((1, 2))

    torch.manual_seed(0)
    x = torch.randn(4, 5, 3).double()
    assert_as_the_loop(Both().double(), x, lambda model, x: model(x) ** 2, engine="low-rank")
    flat = torch.randn(4, 3).double()
    mixed = Both().double()
    assert_as_the_loop(mixed, flat, lambda model, x: model(x.unsqueeze(1)) ** 2, engine="low-rank")


def test_the_comparison_leaves_no_trace_in_buffers() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean.add_(y.detach().mean())
            return y

    model, x = Counts().double(), torch.randn(4, 3).double()
    expected = model.layer(x).mean()
    PerInstanceSAM(rho=0.1).backward(model, x, to_one)
    torch.testing.assert_close(model.mean, expected.detach())


def test_draws_that_cannot_be_repeated_do_not_fail_the_comparison() -> None:
    model, x, own = nn.Linear(3, 1).double(), torch.randn(4, 3).double(), torch.Generator().manual_seed(0)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return to_one(model, x + 0.1 * torch.randn(x.shape, generator=own, dtype=x.dtype))

    PerInstanceSAM(rho=0.1, engine="low-rank").backward(model, x, objective)


def test_adapters_of_weights_in_half_precision_do_not_fail_the_comparison() -> None:
    """The base model rounds by more than the losses differ."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)]).bfloat16().requires_grad_(False)
            self.down = nn.ModuleList([nn.Linear(32, 2, bias=False) for _ in range(6)])
            self.up = nn.ModuleList([nn.Linear(2, 32, bias=False) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            for base, down, up in zip(self.base, self.down, self.up, strict=True):
                x = (base(x) + up(down(x.float())).bfloat16()).tanh()
            return x.float()

    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Adapted(), torch.randn(4, 32).bfloat16()
        PerInstanceSAM(engine="low-rank").backward(model, x, lambda model, x: model(x).square().sum(1))


def test_masks_that_depend_on_the_layout_do_not_fail_the_comparison() -> None:
    """The mask differs under the engine, as with kernels that draw by memory layout: the passes cannot be compared."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            own = type(self.layer.weight) is nn.Parameter
            mask = torch.rand(h.shape, generator=torch.Generator().manual_seed(int(own)), dtype=h.dtype) > 0.5
            return self.out(torch.tanh(h) * mask)

    torch.manual_seed(0)
    PerInstanceSAM(engine="low-rank").backward(Fickle().double(), torch.randn(4, 3).double(), to_one)
