"""Models that the engine fails on fall back to the loop with a warning; errors of the model itself are raised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltasam import DeltaSAM
from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import InstancesMixedError, UncoveredError, instance_gradient_norms, record
from deltasam.weighting import OwnGradient
from helpers.instance_reference import relative


def step_of(model: nn.Module, batch: Any, objective: Any, **options: Any) -> Tensor:
    model.zero_grad()
    PerInstanceSAM(rho=0.1, **options).backward(model, batch, objective)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def assert_as_the_loop(model: nn.Module, batch: Any, objective: Any, warning: str | None) -> None:
    exact = step_of(model, batch, objective, engine="loop")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert relative(step_of(model, batch, objective), exact) < 1e-9
    if warning is None:
        assert not given
    else:
        assert warning in str(given[0].message)
        with pytest.raises(UncoveredError):
            step_of(model, batch, objective, engine="low-rank")


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


class Apply(nn.Module):
    """Two layers, and a function that computes with them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(3, 3), nn.Linear(3, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def without_graph(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
    return m.b(torch.tanh(h))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


def own_backward(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(Product.apply(x, m.a.weight) + m.a.bias))


def looks_closely(m: Any, x: Tensor) -> Tensor:
    if type(m.a.weight) is not nn.Parameter:
        raise KeyError("no parameter")
    return m.b(torch.tanh(m.a(x)))


def reentrant(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(lambda h: torch.tanh(m.a(h)), x.requires_grad_(), use_reentrant=True))


@pytest.mark.parametrize(
    ("function", "warning"),
    [
        (without_graph, None),
        (own_backward, "a.weight (Linear) is used in a torch.autograd.Function"),
        (looks_closely, "KeyError: 'no parameter'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_are_covered_or_warned_about(function: Callable[..., Tensor], warning: str | None) -> None:
    torch.manual_seed(0)
    assert_as_the_loop(Apply(function).double(), torch.randn(4, 3).double(), squares, warning)


def test_a_parameter_that_is_taken_for_a_constant() -> None:
    model, x = Apply(own_backward).double(), torch.randn(4, 3).double()
    with pytest.raises(UncoveredError, match=r"a\.weight.*autograd\.Function"):
        record(model, lambda: squares(model, x), {"a.weight": model.a.weight})


class TimeFirst(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(11, 8), layer, nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(self.words(ids.t()))).mean(0))


@pytest.mark.parametrize("shape", [(4, 5), (4, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_instances_in_the_second_dimension(kind: str, shape: tuple[int, int]) -> None:
    """Neither a batch nor a mixture: passes without proxies show that the instances are independent."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8) if kind == "linear" else nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    batch = (torch.randint(11, shape), torch.randint(3, shape[:1]))
    assert_as_the_loop(TimeFirst(layer).double(), batch, Classification(), "low-rank engine")


@pytest.mark.parametrize("rows", ["batch", "twice", "second"])
def test_losses_that_mix_are_distinguished_from_misread_ones_under_dropout(rows: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(4, 3).double()

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        if rows == "twice":
            first, second = model(torch.cat([x, x])).chunk(2)
        elif rows == "batch":
            first, second = model(x), model(x)
        else:
            first, second = model(x.expand(4, 4, 3)).unbind(0)[:2]
        return nn.functional.cross_entropy(first @ second.T, torch.arange(4), reduction="none")

    with pytest.raises(InstancesMixedError, match="depends on the other instances"):
        PerInstanceSAM().backward(model, x, objective)


def test_reentrant_checkpointing_raises_the_same_error_as_the_loop() -> None:
    """It supports ``backward`` only; the engine does what the loop does."""
    model, x = Apply(reentrant).double(), torch.randn(4, 3).double()
    found = []
    for engine in ("loop", "auto"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(step_of(model, x, squares, engine=engine))
            except RuntimeError as error:
                found.append(str(error).splitlines()[0])  # type: ignore[arg-type]
    assert found[0] == found[1] if isinstance(found[0], str) else relative(found[1], found[0]) < 1e-9


def test_a_parameter_without_elements() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.none = nn.Linear(3, 2), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.none.sum()

    assert_as_the_loop(Odd().double(), torch.randn(4, 3).double(), squares, None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("my own"), KeyError("mine")])
def test_errors_of_the_model_stay_as_they_are(error: Exception) -> None:
    calls = []

    def fails(m: Any, x: Tensor) -> Tensor:
        calls.append(x)
        raise error

    model = Apply(fails)
    with pytest.raises(type(error), match=str(error.args[0])):
        PerInstanceSAM().backward(model, torch.randn(4, 3), squares)
    assert len(calls) == (1 if isinstance(error, torch.OutOfMemoryError) else 2)
    assert all(type(p) is nn.Parameter for p in model.parameters())


class Recurrent(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.out = first, second, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out(self.second(h[0] if isinstance(h, tuple) else h)[0][:, -1])


@pytest.mark.parametrize("kind", ["GRU and LSTM", "table and GRU"])
def test_several_uncovered_operations_are_skipped(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "table and GRU":
        model: nn.Module = Recurrent(nn.Embedding(9, 3, max_norm=1.0), nn.GRU(3, 3, batch_first=True)).double()
        x = torch.randint(9, (4, 5))
    else:
        model = Recurrent(nn.GRU(3, 3, batch_first=True), nn.LSTM(3, 3, batch_first=True)).double()
        x = torch.randn(4, 5, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = step_of(model, x, squares, uncovered="skip")
    exact = step_of(model, x, squares, engine="loop", params=lambda name, p: name.startswith("out"))
    assert relative(mine, exact) < 1e-9


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def is_unused(name: str, p: Tensor) -> bool:
    return "unused" in name


@pytest.mark.parametrize(
    "method",
    [PerInstanceSAM(params=is_unused, engine="low-rank"), DeltaSAM(weighting=OwnGradient(), params=is_unused)],
    ids=lambda m: type(m).__name__,
)
def test_nothing_to_perturb_is_skipped(method: Any) -> None:
    model, x = Unused().double(), torch.randn(4, 3).double()
    plain = torch.autograd.grad(squares(model, x).mean(), model.used.weight)[0]
    for _ in range(2):
        model.zero_grad()
        step = method.backward(model, x, squares)
        assert bool(step.skipped)
        assert relative(model.used.weight.grad, plain) < 1e-9
    norms = instance_gradient_norms(model, x, squares, params=is_unused)
    assert torch.equal(norms.double(), torch.zeros(4).double())


class Tagger(nn.Module):
    """A layer without a rule, and one with."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x.unsqueeze(0))[0].squeeze(0))
        return y


def test_a_recording_that_fails_is_not_counted() -> None:
    """The loop counts the same passes whether or not the engine was tried."""
    model, x = Tagger(), torch.randn(5, 3)
    with pytest.warns(UserWarning, match="one after the other"):
        tried = PerInstanceSAM(rho=0.1).backward(model, x, squares)
    looped = PerInstanceSAM(rho=0.1, engine="loop").backward(model, x, squares)
    assert (tried.forwards, tried.backwards) == (looped.forwards, looped.backwards) == (1 + 2 * 5, 2 * 5)


def test_skipped_parameters_cost_no_counted_pass() -> None:
    model, x = Tagger(), torch.randn(5, 3)
    with pytest.warns(UserWarning, match="left unperturbed"):
        step = PerInstanceSAM(rho=0.1, uncovered="skip").backward(model, x, squares)
    assert (step.forwards, step.backwards) == (2, 2)
