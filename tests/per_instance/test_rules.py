"""The rules: every operation is exact, users can add rules, and failing rules are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.per_instance import UncoveredError, record, register_rule
from deltasam.per_instance.interception.tensors import RULES
from helpers.instance_reference import gradient_errors, loop, relative


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def assert_exact(model: nn.Module, run: Callable[[], Tensor], group: int = 1) -> None:
    exact = loop(model, run, 0.1, group)
    model.zero_grad()
    recording = record(model, run, group=group)
    with recording.perturbed(0.1 / recording.norms):
        run().mean().backward()
    assert relative(recording.norms, exact.norms) <= 1e-9
    assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) <= 1e-9


class Apply(nn.Module):
    """Parameters and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        self.function = function
        self.names = list(shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(getattr(self, name) for name in self.names))


CASES: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    "linear": (F.linear, {"w": (5, 6), "b": (5,)}, (4, 3, 6)),
    "linear of vectors": (F.linear, {"w": (5, 6), "b": (5,)}, (4, 6)),
    "linear of many positions": (F.linear, {"w": (5, 6)}, (4, 3, 2, 6)),
    "matmul": (torch.matmul, {"w": (6, 5)}, (4, 3, 6)),
    "einsum": (lambda x, w: torch.einsum("nti,oi->nto", x, w), {"w": (5, 6)}, (4, 3, 6)),
    "scale, shift": (lambda x, a, b: torch.addcmul(b, x, a), {"a": (6,), "b": (6,)}, (4, 3, 6)),
    "scale of a batch": (lambda x, a: a * x, {"a": (6,)}, (4, 3, 6)),
    "scale of vectors": (lambda x, a: torch.mul(x, other=a), {"a": (6,)}, (4, 6)),
    "scale of positions": (lambda x, a: (x.flatten(0, 1) * a).view_as(x), {"a": (6,)}, (4, 3, 6)),
    "scale, several times": (lambda x, a: a * x.tanh() + (x * a).sin() + a, {"a": (6,)}, (4, 3, 6)),
    "scale of a constant": (lambda x, a: x + a * torch.ones(3, 6, dtype=x.dtype), {"a": (6,)}, (4, 3, 6)),
    "functions of a parameter": (lambda x, a: x * a.exp().softmax(0) - F.softplus(a[1]), {"a": (6,)}, (4, 3, 6)),
    "weight normalisation": (lambda x, g, v: F.linear(x, g * v / v.norm(dim=1, keepdim=True)),
                             {"g": (5, 1), "v": (5, 6)}, (4, 6)),
    "transposed": (lambda x, w: F.linear(x, w.T), {"w": (6, 5)}, (4, 3, 6)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2),
               {"w": (5, 3, 2), "b": (5,)}, (4, 3, 8)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 0)),
               {"w": (5, 3, 2, 3), "b": (5,)}, (4, 3, 6, 5)),
    "conv2d in groups": (lambda x, w, b: F.conv2d(x, w, b, groups=3), {"w": (6, 1, 2, 2), "b": (6,)}, (4, 3, 4, 4)),
    "conv2d, padding by name": (lambda x, w: F.conv2d(x, w, padding="same"), {"w": (2, 3, 3, 3)}, (4, 3, 4, 4)),
    "conv3d": (F.conv3d, {"w": (2, 3, 2, 2, 2), "b": (2,)}, (4, 3, 3, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, {"w": (3, 2, 2, 2), "b": (2,)}, (4, 3, 3, 3)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3, 6), w, b), {"w": (3, 6), "b": (3, 6)}, (4, 2, 3, 6)),
    "layer_norm without a shift": (lambda x, w: F.layer_norm(x, (6,), w), {"w": (6,)}, (4, 3, 6)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), {"w": (6,)}, (4, 3, 6)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), {"w": (6,), "b": (6,)}, (4, 6, 3, 2)),
    "prelu": (F.prelu, {"w": (3,)}, (4, 3, 5)),
    "bilinear": (lambda x, w, b: F.bilinear(x, x, w, b), {"w": (2, 6, 6), "b": (2,)}, (4, 6)),
    "token in front": (lambda x, t: torch.cat([t.expand(x.shape[0], 1, -1), x], 1), {"t": (1, 1, 6)}, (4, 3, 6)),
    "token repeated": (lambda x, t: torch.cat([t.repeat(x.shape[0], 1, 1), x], 1), {"t": (1, 2, 6)}, (4, 3, 6)),
    "positions in place": (lambda x, t: x.clone().add_(t[:3]), {"t": (5, 6)}, (4, 3, 6)),
    "used twice": (lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), {"w": (5, 6)}, (4, 3, 6)),
    "sum of two": (lambda x, a, b: x @ (a + b), {"a": (6, 5), "b": (6, 5)}, (4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_operation(name: str, group: int) -> None:
    torch.manual_seed(0)
    function, shapes, size = CASES[name]
    model, x = Apply(function, **shapes), torch.randn(size, dtype=torch.float64)
    assert_exact(model, lambda: model(x).sin().square().flatten(1).sum(1), group)


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_tied_table_and_head(padding: int | None) -> None:
    """A lookup and a head share a table: the cross terms count, and the padding row is not perturbed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 6, padding_idx=padding, dtype=torch.float64)
            self.bias = nn.Parameter(torch.randn(40, dtype=torch.float64))

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.table(ids).cumsum(1).tanh(), self.table.weight, self.bias)

    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(40, (4, 3))
    ids[:, 1], ids[0, 0] = ids[:, 0], 2
    for group in (1, 2):
        assert_exact(model, lambda: F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").sum(1), group)


def test_a_registered_rule() -> None:
    calls: list[Any] = []

    @register_rule(F.bilinear)
    def bilinear(state: Any, first: Tensor, second: Tensor, weight: Any, bias: Any = None) -> Tensor:
        calls.append(weight)
        return torch.einsum("ni,noij,nj->no", first, state.values(weight), second)

    torch.manual_seed(0)
    model, x = Apply(lambda x, w: F.bilinear(x, x, w), w=(2, 6, 6)), torch.randn(4, 6, dtype=torch.float64)
    assert_exact(model, lambda: model(x).square().sum(1))
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.01])
def test_a_rule_with_other_losses_than_the_model_is_found(factor: float, dtype: torch.dtype) -> None:
    @register_rule(F.bilinear)
    def bilinear(state: Any, first: Tensor, second: Tensor, weight: Any, bias: Any = None) -> Tensor:
        return factor * torch.einsum("ni,noij,nj->no", first, state.values(weight), second)

    torch.manual_seed(0)
    model, x = Apply(lambda x, w: F.bilinear(x, x, w), w=(2, 6, 6)).to(dtype), torch.randn(4, 6, dtype=dtype)
    with pytest.raises(UncoveredError, match="moved weights"):
        record(model, lambda: (model(x) - 1).square().sum(1))


@pytest.mark.parametrize("dropped", [True, False])
def test_a_right_rule_in_a_model_with_draws_passes_the_comparison(dropped: bool) -> None:
    """Attention with dropout, and draws of a generator that no pass can rewind."""

    @register_rule(F.bilinear)
    def bilinear(state: Any, first: Tensor, second: Tensor, weight: Any, bias: Any = None) -> Tensor:
        return torch.einsum("ni,noij,nj->no", first, state.values(weight), second)

    own = torch.Generator().manual_seed(0)

    def noisy(x: Tensor, w: Tensor) -> Tensor:
        rows = x.view(4, 1, 2, 3)
        if dropped:
            mixed = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)
        else:
            mixed = rows + torch.randn(rows.shape, generator=own, dtype=rows.dtype)
        return F.bilinear(x, mixed.reshape(4, 6), w)

    def assert_recorded(seed: int) -> None:
        torch.manual_seed(seed)
        model, x = Apply(noisy, w=(2, 6, 6)), torch.randn(4, 6, dtype=torch.float64)
        assert record(model, lambda: (model(x) - 1).square().sum(1)).losses.shape == (4,)

    for seed in range(20):  # two passes may happen to draw the same mask of four
        assert_recorded(seed)


def divides(state: Any, *args: Any) -> Tensor:
    raise ZeroDivisionError("oops")


def forgets(state: Any) -> None:
    """A rule that takes none of the arguments of the operation."""


def repeats(state: Any, first: Tensor, second: Tensor, weight: Any) -> Tensor:
    return F.bilinear(first, second, weight)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (divides, r"fails \(ZeroDivisionError: oops\)"),
        (forgets, r"fails \(TypeError: forgets\(\) takes 1 positional"),
        (repeats, r"calls itself: .* state\.values\(weight\)"),
    ],
)
def test_a_rule_that_fails_is_named(rule: Callable[..., Any], message: str) -> None:
    register_rule(F.bilinear)(rule)
    model, x = Apply(lambda x, w: F.bilinear(x, x, w), w=(2, 6, 6)), torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(UncoveredError, match=f"^the rule {rule.__name__} for the operation bilinear {message}"):
        record(model, lambda: model(x).square().sum(1))


def test_other_errors_in_a_rule_are_raised_unchanged() -> None:
    class MineError(Exception):
        pass

    for error in (MineError("mine"), torch.OutOfMemoryError("no memory")):

        @register_rule(F.bilinear)
        def fails(state: Any, *args: Any, error: Exception = error) -> Tensor:
            raise error

        model, x = Apply(lambda x, w: F.bilinear(x, x, w), w=(2, 6, 6)), torch.randn(4, 6, dtype=torch.float64)
        with pytest.raises(type(error), match=str(error)):
            record(model, lambda model=model, x=x: model(x).square().sum(1))


def test_an_option_that_a_rule_refuses_is_named() -> None:
    model = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True).double()
    x = torch.randn(3, 2, 4).double()
    with pytest.raises(UncoveredError, match=r"in_proj_weight \(MultiheadAttention\).*add_bias_kv"):
        record(model, lambda: model(x, x, x)[0].square().sum((1, 2)), size=3)
    table = nn.Embedding(5, 4, max_norm=1.0).double()
    with pytest.raises(UncoveredError, match=r"weight \(Embedding\).*max_norm"):
        record(table, lambda: table(torch.tensor([[1, 2], [3, 4]])).square().sum((1, 2)))
