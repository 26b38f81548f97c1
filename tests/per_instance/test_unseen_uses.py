"""Uses of a weight that no rule sees beside uses that one does: found on first use, whatever the gradient shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam import PerInstanceSAM
from deltasam.analysis import adversarial_risk
from deltasam.per_instance import InstancesMixedError, UncoveredError, register_rule
from deltasam.per_instance.interception.tensors import RULES
from helpers.instance_reference import gradient_errors, loop
from helpers.problems import grads


def assert_exact(model: nn.Module, x: Tensor, objective: Any, warning: str = "", tolerance: float = 1e-9) -> None:
    """A step, and what it warns of."""
    exact = loop(model, lambda: objective(model, x), 0.05).gradient
    model.zero_grad()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        PerInstanceSAM(rho=0.05).backward(model, x, objective)
    assert gradient_errors(grads(model), exact) < tolerance
    assert [str(each.message) for each in given if not warning or warning not in str(each.message)] == []
    assert len(given) == bool(warning)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ h.flatten(0, -2)


class Sine(torch.autograd.Function):
    """A sine whose gradient is taken to be 1."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class TiedModel(nn.Module):
    """The table of the embedding is the head, too: a head that computes with it in a function of its own."""

    def __init__(self, head: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), head

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return self.head(h + torch.tanh(self.layer(h)).cumsum(1), self.table.weight)


class RoundedModel(nn.Module):
    """Computes with a weight, and with a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(6, 6) / 2), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.weight + Sine.apply(2 * self.weight)).tanh())


def next_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize(("head", "warning"), [(F.linear, ""), (Product.apply, "torch.autograd.Function")])
def test_a_tied_weight_in_a_function(head: Any, warning: str) -> None:
    assert_exact(TiedModel(head).double(), torch.randint(0, 20, (4, 8)), next_tokens, warning)


def test_a_weight_and_a_function_of_it() -> None:
    assert_exact(RoundedModel().double(), torch.randn(4, 5, 6).double(), squares, "torch.autograd.Function")


class Doubled(torch.autograd.Function):
    """A function that uses no weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


class DoublingModel(nn.Module):
    """A graph with a function, and with a buffer that it saves."""

    mix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("mix", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.last(self.first(x).tanh() @ self.mix))


def test_a_function_without_weights_is_no_reason_to_loop() -> None:
    model, x = DoublingModel().double(), torch.randn(4, 6).double()
    assert_exact(model, x, squares)
    model.last.register_full_backward_hook(lambda *_: None)  # torch wraps the module in a function of its own
    model.first.weight.register_hook(lambda g: None)
    assert_exact(model, x, squares)


def test_a_step_where_gradients_are_disabled() -> None:
    with torch.no_grad():
        PerInstanceSAM(engine="low-rank").backward(DoublingModel(), torch.randn(4, 6), squares)


def test_the_gradient_at_other_weights_is_no_reason_to_loop() -> None:
    """Near a minimum the losses of a second ascent step are those at w, but not the gradients."""
    model, x = DoublingModel(), torch.randn(4, 6)
    with torch.no_grad():
        model.last.weight.mul_(1e-3)
        model.last.bias.zero_()

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return 1 + squares(model, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adversarial_risk(model, [x], objective, rho=0.01, steps=3)


class BesideModel(nn.Module):
    """A function uses a weight besides its layer, a little, or for one instance only."""

    def __init__(self, share: float, *, one: bool) -> None:
        super().__init__()
        self.first, self.last, self.share, self.one = nn.Linear(6, 6), nn.Linear(6, 6), share, one

    def forward(self, x: Tensor) -> Tensor:
        beside = self.share * Product.apply(x, self.first.weight)
        if self.one:
            beside = beside * (x[:, :1] >= x[:, 0].max())
        return self.last(self.first(x).tanh()) + beside


def test_a_function_that_adds_little() -> None:
    assert_exact(BesideModel(1e-3, one=False), torch.randn(4, 6), squares, "torch.autograd.Function", tolerance=1e-5)
    model = BesideModel(1e-3, one=True).double()
    assert_exact(model, torch.randn(16, 6).double(), squares, "torch.autograd.Function")


def test_a_frozen_weight_in_a_function() -> None:
    model = BesideModel(1e-3, one=True).double()
    model.first.weight.requires_grad_(False)
    with pytest.raises(UncoveredError, match=r"first\.weight .*autograd\.Function"):
        PerInstanceSAM(engine="low-rank", params="all").backward(model, torch.randn(16, 6).double(), squares)


def test_a_rule_may_stand_for_a_function() -> None:
    def product(h: Tensor, w: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((h, w)):
            return torch.overrides.handle_torch_function(product, (h, w), h, w)
        return Product.apply(h, w)

    model, ids = TiedModel(product).double(), torch.randint(0, 20, (4, 8))

    @register_rule(product)
    def rule(state: Any, h: Tensor, w: Any) -> Tensor:
        return torch.einsum("nti,noi->nto", h, state.values(w))

    try:
        assert_exact(model, ids, next_tokens)
    finally:
        del RULES[product]


class Penalised:
    """A gradient penalty, whose graph uses the weights once more. Its factor may grow in a training."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = model(x).squeeze(-1)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y - 1) ** 2 + self.factor * gradient.square().sum(1)


def penalised_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def test_a_gradient_penalty() -> None:
    model, x, objective = penalised_model().double(), torch.randn(4, 6).double(), Penalised(0.0)
    assert_exact(model, x, objective, "derivative of the model")
    objective.factor = 1.0
    assert_exact(model, x, objective)


def test_a_gradient_penalty_that_does_not_enable_gradients_names_the_remedy() -> None:
    def objective(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum(1)

    with pytest.warns(UserWarning, match="derivative"), pytest.raises(RuntimeError, match=r"torch\.enable_grad\(\)"):
        PerInstanceSAM().backward(penalised_model(), torch.randn(4, 6), objective)


def test_a_small_gradient_penalty_in_float32() -> None:
    assert_exact(penalised_model(), torch.randn(4, 6), Penalised(0.03), "derivative of the model", tolerance=1e-5)


class TwoTables(nn.Module):
    """Batches of a domain have a vector of the domain, the others vectors of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Tensor | None = None
        self.domain, self.position = (nn.Parameter(torch.randn(8, 6)) for _ in range(2))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.known is not None:
            x = x + self.domain[self.known[: len(x)]].unsqueeze(1)
        else:
            x = x + self.position[torch.arange(x.shape[1])]
        return self.layer(x).tanh().cumsum(1)


def test_a_branch_with_other_parameters_is_compared_anew() -> None:
    model = TwoTables().double()
    model.known = torch.tensor([1, 1, 1, 1])
    assert_exact(model, torch.randn(4, 5, 6).double(), squares)
    model.known = None
    assert_exact(model, torch.randn(4, 4, 6).double(), squares, "getitem")  # T = N


def test_a_hook_of_a_weight_that_comes_later() -> None:
    model, x = nn.Linear(6, 6).double(), torch.randn(4, 5, 6).double()
    assert_exact(model, x, squares)
    mask = (torch.arange(6) < 3).double().unsqueeze(1)
    handle = model.weight.register_hook(lambda g: g * mask)
    assert_exact(model, x, squares, "hook")
    handle.remove()
    assert_exact(model, x, squares)


def test_a_hook_in_the_place_of_another() -> None:
    model, x = nn.Linear(6, 6).double(), torch.randn(4, 5, 6).double()
    handle = model.weight.register_hook(lambda g: None)
    assert_exact(model, x, squares)
    handle.remove()
    mask = (torch.arange(6) < 3).double().unsqueeze(1)
    model.weight.register_hook(lambda g: g * mask)
    assert_exact(model, x, squares, "hook")


def test_a_later_hook_of_a_compiled_model() -> None:
    model, x = nn.Linear(6, 6).double(), torch.randn(4, 5, 6).double()
    model.compile(backend="eager")
    for _ in range(2):
        assert_exact(model, x, squares)
    model.weight.register_hook(lambda g: None)
    assert_exact(model, x, squares)
    mask = (torch.arange(6) < 3).double().unsqueeze(1)
    model.weight.register_hook(lambda g: g * mask)
    assert_exact(model, x, squares, "hook")


class Noting(nn.Module):
    """Notes values made from a weight: in a plain attribute, or in a buffer that later passes read."""

    run: Tensor

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(6, 6), where
        self.register_buffer("run", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.size = self.layer.weight.square().sum()
            vars(self)["same"] = self.layer.weight
        elif self.where == "buffer":
            self.run = 0.9 * self.run + 0.1 * self.layer.weight.detach()
        return self.layer(x).tanh() + 0.1 * (x @ self.run)


def test_a_value_that_a_model_notes_stays_a_plain_tensor() -> None:
    model, x = Noting("attribute").double(), torch.randn(4, 5, 6).double()
    for _ in range(2):
        assert_exact(model, x, squares)
        assert type(model.size) is Tensor
        assert model.same is model.layer.weight
        torch.testing.assert_close(model.size, model.layer.weight.detach().square().sum())


def test_a_buffer_made_from_a_weight_is_that_of_the_loop() -> None:
    results = []
    for engine in ("loop", "low-rank"):
        torch.manual_seed(0)
        model, x = Noting("buffer").double(), torch.randn(4, 5, 6).double()
        for _ in range(2):
            step = PerInstanceSAM(rho=0.05, engine=engine).backward(model, x, squares)
            assert type(model.run) is Tensor
            assert type(model.state_dict()["run"]) is Tensor
        results.append((step.losses, model.run, model.layer.weight.grad))
    torch.testing.assert_close(*results)


def test_a_failed_pass_leaves_plain_tensors() -> None:
    model, x = Noting("attribute").double(), torch.randn(4, 5, 6).double()

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        PerInstanceSAM().backward(model, x, failing)
    assert type(model.size) is Tensor
    assert model.same is model.layer.weight


class MixingInTraining(nn.Module):
    """Adds the mean over the batch in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h + h.mean(0, keepdim=True) if self.training else h)


def test_a_model_that_mixes_in_training_mode_is_refused_there() -> None:
    model, x = MixingInTraining().double().eval(), torch.randn(4, 6).double()
    assert_exact(model, x, squares)
    with pytest.raises(InstancesMixedError):
        PerInstanceSAM().backward(model.train(), x, squares)
    assert_exact(model.eval(), x, squares)


class AssigningData(nn.Module):
    """Keeps a function of its weight by assigning to ``.data``."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("kept", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.data = self.layer.weight.square()
        return self.layer(x).tanh() + 0.1 * (x @ self.kept)


def test_an_assignment_to_data_is_looped_over() -> None:
    model, x = AssigningData().double(), torch.randn(4, 5, 6).double()
    assert_exact(model, x, squares, "moved weights")
    torch.testing.assert_close(model.kept, model.layer.weight.detach().square())
