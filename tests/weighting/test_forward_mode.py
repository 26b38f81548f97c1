"""Second derivatives in forward mode against Hessian-vector products in float64, where torch is wrong or has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.methods import DeltaSAM
from deltasam.objectives import Classification
from deltasam.step.directions import random_direction
from deltasam.step.passes import Passes
from deltasam.step.randomness import Seed
from deltasam.weighting import Directional
from deltasam.weighting._directional import derivatives_along


class Then(nn.Module):
    """A linear layer, an operation with a weight and a bias, and a nonlinearity."""

    def __init__(self, operation: Callable[..., Tensor], channels: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(channels))
        self.bias = nn.Parameter(torch.randn(channels))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.linear(x), self.weight, self.bias)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).tanh().flatten(1).square().sum(1)


def by_hand(model: nn.Module, x: Tensor, r: list[Tensor]) -> tuple[Tensor, Tensor]:
    params, firsts, seconds = list(model.parameters()), [], []
    for i in range(len(x)):
        grad = torch.autograd.grad(losses(model, x)[i], params, create_graph=True, materialize_grads=True)
        first = torch.stack([(g * v).sum() for g, v in zip(grad, r, strict=True)]).sum()
        curve = torch.autograd.grad(first, params, allow_unused=True)
        firsts.append(first.detach())
        seconds.append(sum((h * v).sum() for h, v in zip(curve, r, strict=True) if h is not None))
    return torch.stack(firsts), torch.stack(seconds)


def none(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)


NORMS: dict[str, Callable[..., Tensor]] = {
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (6,), w, b),
    "torch.layer_norm by keyword": lambda x, w, b: torch.layer_norm(input=x, normalized_shape=(6,), weight=w, bias=b),
    "F.batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w[:5], b[:5], training=True),
    "F.batch_norm, running": lambda x, w, b: F.batch_norm(x, *none(), weight=w[:5], bias=b[:5]),
    "F.instance_norm": lambda x, w, b: F.instance_norm(x, weight=w[:5], bias=b[:5]),
    "F.instance_norm, running": lambda x, w, b: F.instance_norm(x, *none(), w[:5], b[:5], use_input_stats=False),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x.mT, 2, w, b, 1e-5),
    "torch.native_group_norm": lambda x, w, b: torch.native_group_norm(x.mT.contiguous(), w, b, 4, 6, 5, 2, 1e-5)[0],
    "F.group_norm, channels last": lambda x, w, b: F.group_norm(
        x.mT.unsqueeze(-1).expand(-1, -1, -1, 2).to(memory_format=torch.channels_last), 2, w, b
    ),
    "F.layer_norm": lambda x, w, b: F.layer_norm(x, (6,), w, b),
    "F.rms_norm": lambda x, w, b: F.rms_norm(x, (6,), w) + b,
}
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1.0, inplace=True),
    "mish": F.mish,
    "mish in place": lambda x: F.mish(input=x * 1.0, inplace=True),
    "glu": F.glu,
    "glu over tokens": lambda x: F.glu(torch.cat([x, x.sin()], 1), dim=1),
    "prelu": lambda x: F.prelu(x, x[0, 0, :1]),
}
CONSTANTS: dict[str, Callable[..., Tensor]] = {  # refused only if they depend on the weights
    "logdet of a constant": lambda x, w, b: (x * w + b) * torch.logdet(2 * torch.eye(3)),
    "linalg.slogdet of a constant": lambda x, w, b: (x * w + b) * torch.linalg.slogdet(A=2 * torch.eye(3)).logabsdet,
    "cumprod of a constant": lambda x, w, b: (x * w + b) * torch.arange(6.0, dtype=x.dtype).cumprod(0),
}


def _reduced(x: Tensor, *args: str, **options: str) -> Tensor:
    return x.scatter_reduce(-1, _ids(x), x.sin(), *args, **options)


def _ids(x: Tensor) -> Tensor:
    return torch.arange(6).expand(x.shape) // 2


def _regular(x: Tensor) -> Tensor:
    return 0.1 * x[..., :5] + torch.eye(5, dtype=x.dtype)


def _with_zeros(x: Tensor) -> Tensor:
    """One or two entries that are zero and depend on the weights."""
    away = torch.zeros_like(x)
    away[..., 2] = 1
    away[:, 1, 4] = 1
    return x - (x * away).detach()


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "prod with zeros": lambda x, w, b: 0.3 + _with_zeros(x * w + b).prod(-1),
}
WRITTEN_OUT = {name: lambda x, w, b, f=f: f(x * w + b) for name, f in ACTIVATIONS.items()}
REDUCED = {
    "scatter_reduce, sum": lambda x, w, b: _reduced(x * w + b, "sum"),
    "scatter_reduce, amax": lambda x, w, b: _reduced(x * w + b, reduce="amax"),
}
CASES = {**NORMS, **CONSTANTS, **REDUCED, **PRODUCTS, **WRITTEN_OUT}


@pytest.mark.parametrize("operation", CASES.values(), ids=CASES.keys())
def test_both_derivatives(operation: Callable[..., Tensor]) -> None:
    model, x = Then(operation).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    passes = Passes(model, x, losses)
    r = random_direction(list(model.parameters()), Seed(0, 0))
    found = derivatives_along(passes, dict(zip(passes.params, r, strict=True)))
    for one, wanted in zip(found, by_hand(model, x, r), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_a_cross_entropy_in_chunks() -> None:
    """In chunks its derivatives are 0, and so are all weights."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    labels = torch.tensor([0, 1, 2, 0])

    def operation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        loss = F.linear_cross_entropy(x[:, 0], torch.outer(w, b)[:3], labels, reduction="none", options=options)
        return loss[:, None]

    model, x = Then(operation).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    passes = Passes(model, x, lambda model, x: model(x).squeeze(-1))
    r = dict(zip(passes.params, random_direction(list(model.parameters()), Seed(0, 0)), strict=True))
    found = derivatives_along(passes, r)
    options = None
    for one, wanted in zip(found, derivatives_along(passes, r), strict=True):
        assert bool((wanted != 0).all())
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-9)


def test_operations_in_place_stay_in_place() -> None:
    seen: list[Any] = []

    def operation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = x * w + b
        seen.append((F.silu(y, inplace=True) - y).abs().sum())
        return y

    model, x = Then(operation), torch.randn(4, 5, 6)
    DeltaSAM(weighting=Directional()).backward(model, x, losses)
    assert all(float(difference.detach()) == 0 for difference in seen[1:])


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class _WithoutForwardMode(_Own):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def _adversarial(y: Tensor) -> Tensor:
    """Takes gradients in every pass, as SMART and VAT do."""
    with torch.enable_grad():
        noise = torch.zeros_like(y).requires_grad_()
        return y + torch.autograd.grad((y.detach() + noise).square().sum(), noise)[0]


LACKING = {
    "_cdist_forward": lambda x, w, b: torch.cdist(x * w + b, x),
    "an autograd.Function of the model": lambda x, w, b: _Own.apply(x * w + b),
    "autograd.Function of the model": lambda x, w, b: _WithoutForwardMode.apply(x * w + b),
    "an objective that takes gradients itself": lambda x, w, b: _adversarial(x * w + b),
    "batch_norm": lambda x, w, b: torch.batch_norm(x, w[:5], b[:5], None, None, True, 0.1, 1e-5, False),
    "native_batch_norm": lambda x, w, b: torch.native_batch_norm(x, w[:5], b[:5], None, None, True, 0.1, 1e-5)[0],
    "native_layer_norm": lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0],
    "instance_norm": lambda x, w, b: torch.instance_norm(x, w[:5], b[:5], None, None, True, 0.1, 1e-5, False),
    "linalg_solve": lambda x, w, b: torch.linalg.solve(_regular(x * w), x + b),
    "cumprod": lambda x, w, b: torch.cumprod(input=x * w + b, dim=-1),
    "logcumsumexp": lambda x, w, b: torch.logcumsumexp(x * w + b, -1),
    "cumprod_": lambda x, w, b: (x * w + b).cumprod_(-1),
    "linalg_det": lambda x, w, b: torch.linalg.det(_regular(x * w + b))[:, None],
    "linalg_slogdet": lambda x, w, b: torch.linalg.slogdet(_regular(x * w + b)).logabsdet[:, None],
    "logdet": lambda x, w, b: _regular(x * w + b).logdet()[:, None],
    "scatter_reduce": lambda x, w, b: _reduced(x * w + b, "prod"),
    "scatter_reduce_": lambda x, w, b: torch.ones(4, 5, 6).scatter_reduce_(2, _ids(x), x * w + b, "prod"),
    "cholesky_inverse": lambda x, w, b: torch.cholesky_inverse(_regular(x * w + b).tril()),
    "triangular_solve": lambda x, w, b: torch.triangular_solve(x, _regular(x * w + b), transpose=True).solution,
    "linalg_householder_product": lambda x, w, b: torch.linalg.householder_product((x * w).mT, (x + b)[:, 0, :5]),
}


@pytest.mark.parametrize("name", LACKING)
def test_operations_without_a_second_derivative_are_refused(name: str) -> None:
    model, x = Then(LACKING[name]), torch.randn(4, 5, 6)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotImplementedError, match=rf"Directional.*{name}.*FiniteDifference\(\)"):
        DeltaSAM(weighting=Directional()).backward(model, x, losses)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.skipif(
    hasattr(torch.utils.checkpoint, "_NoopSaveInputs"), reason="this torch has no forward mode of checkpoints"
)
def test_activation_checkpointing_and_its_hook_on_the_input() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(1, 31, (4, 7)), "labels": torch.tensor([0, 1, 2, 0])}
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        weights.append(DeltaSAM(weighting=Directional()).backward(model, batch, Classification()).weights)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # for adapters; later versions of transformers do it themselves
    torch.testing.assert_close(weights[0], weights[1])


def test_a_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    ids = torch.randint(1, 31, (4, 7))

    def objective(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids, use_cache=False).logits, ids[:, 0] % 3, reduction="none")

    step = DeltaSAM(weighting=Directional()).backward(model, ids, objective)
    assert step.weights is not None
    assert (step.weights > 0).all()
