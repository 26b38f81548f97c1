"""Shared tables that have k N rows for some lengths only, in operations without a rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import UncoveredError
from helpers.instance_reference import relative

SHAPES = ((3, 5), (4, 8), (8, 8), (5, 5), (2, 8), (3, 5))


class Table(nn.Module):
    """Combines word vectors and a vector of parameters by a function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], length: int = 8) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.vector = nn.Parameter(torch.randn(length))
        self.function = function

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.function(self.words(ids), self.vector)).mean(1))


def rotated(h: Tensor, f: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(h.shape[1], dtype=h.dtype), f)
    return torch.cat([h[..., :4] * angles.cos(), h[..., 4:] * angles.sin()], -1)


ENCODING = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MATRIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def scaled_encoding(h: Tensor, gamma: Tensor) -> Tensor:
    return h + gamma * ENCODING[: h.shape[1]]


def bias_of_a_shared_layer(h: Tensor, bias: Tensor) -> Tensor:
    return h + F.linear(ENCODING[: h.shape[1]], MATRIX, bias).tanh()


def picked(h: Tensor, table: Tensor) -> Tensor:
    return h + table[torch.arange(h.shape[1]) % 3].unsqueeze(-1)


def grown(h: Tensor, vector: Tensor) -> Tensor:
    return h + (vector.expand(h.shape[1], -1) * ENCODING[: h.shape[1]]).tanh()


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "rotation with trained frequencies": (rotated, 4),
    "scaled encoding": (scaled_encoding, 8),
    "bias of a layer that is shared": (bias_of_a_shared_layer, 8),
    "rows by number": (picked, 8),
    "grown to the length": (grown, 8),
}


def assert_equals_the_loop(model: nn.Module) -> None:
    """Compares the low-rank engine with the loop over the instances, in every shape."""
    for n, length in SHAPES:
        batch = (torch.randint(11, (n, length)), torch.randint(3, (n,)))
        found = []
        for engine in ("auto", "loop"):
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                PerInstanceSAM(rho=0.3, engine=engine).backward(model, batch, Classification())  # type: ignore[arg-type]
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert relative(found[0], found[1]) < 1e-9, (n, length)


@pytest.mark.parametrize("name", CASES)
def test_shapes_that_are_ambiguous_only_later_are_exact(name: str) -> None:
    torch.manual_seed(0)
    model = Table(*CASES[name]).double()
    assert_equals_the_loop(model)


def test_a_leading_dimension_of_one_keeps_a_table_in_low_rank() -> None:
    """The remedy that the warning names."""
    torch.manual_seed(0)
    batch = (torch.randint(11, (4, 8)), torch.randint(3, (4,)))
    with pytest.warns(UserWarning, match=r"vector.* mul\(\) .*N = 4.*unsqueeze\(0\)"):
        PerInstanceSAM(rho=0.3).backward(Table(scaled_encoding).double(), batch, Classification())
    model = Table(lambda h, gamma: h + gamma * ENCODING[: h.shape[1]].unsqueeze(0)).double()
    gradients = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.3, engine=engine).backward(model, batch, Classification())  # type: ignore[arg-type]
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(*gradients) < 1e-9


class Both(nn.Module):
    """A layer that is called with the flattened batch and with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        h = self.layer(self.words(ids).flatten(0, 1)).tanh().view(n, length, 8)
        return self.out((h + self.layer(ENCODING[:length]).tanh()).mean(1))


def test_a_layer_called_with_a_table_and_with_the_batch() -> None:
    """One more call in some shapes: the flattened batch was compared before, the table was not."""
    torch.manual_seed(0)
    model = Both().double()
    assert_equals_the_loop(model)


def test_a_correction_that_does_not_help_is_dropped() -> None:
    """A shape that falls back to the loop does not take the low-rank engine from other shapes."""
    torch.manual_seed(0)
    model = Both().double()
    for n, length, covered in ((4, 8, False), (3, 5, True)):
        batch = (torch.randint(11, (n, length)), torch.randint(3, (n,)))
        with nullcontext() if covered else pytest.raises(UncoveredError, match=r"layer\.weight"):
            PerInstanceSAM(engine="low-rank").backward(model, batch, Classification())
