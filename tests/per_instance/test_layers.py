"""Compares layers at the weights of every instance with formulas that autograd differentiates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltasam.per_instance.algebra.factors import LowRank, Products
from deltasam.per_instance.algebra.layers import perturbed_linear, perturbed_norm

WAYS = pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "function"])


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def constants(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [value.detach().flip(0) for value in leaves(*shapes)]


def saved_by(run: object) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()  # type: ignore[operator]
    return kept


def agree(found: Tensor, wanted: Tensor, targets: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    of = [torch.autograd.grad((y * weights).sum(), targets, retain_graph=True) for y in (found, wanted)]
    torch.testing.assert_close(*of)


@WAYS
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 1), (2, 7, 3)])
def test_a_linear_layer_with_and_without_bias(shape: tuple[int, int, int], folded: bool, is_eager: bool) -> None:
    n, s, out = shape
    x, matrix, bias = leaves((n, s, 6), (out, 6), (out,))
    recorded, d, c = constants((n, s, 6), (n, s, out), (n,))
    factor, scale = LowRank(recorded, d, folded, False), c.view(-1, 1, 1)
    product = scale * (x @ recorded.mT + (1 if folded else 0))
    for offset in (bias, None):
        found = perturbed_linear(x, matrix, offset, factor, c, Products(), is_eager=is_eager)
        targets = [x, matrix] if offset is None else [x, matrix, bias]
        agree(found, F.linear(x, matrix, offset) + product @ d, targets)


@WAYS
def test_layers_with_one_input_share_the_product(is_eager: bool) -> None:
    x, first, second = leaves((2, 3, 4), (5, 4), (5, 4))
    recorded, d, e, c = constants((2, 3, 4), (2, 3, 5), (2, 3, 5), (2,))
    products, scale = Products(), c.view(-1, 1, 1)
    found = [
        perturbed_linear(x, matrix, None, LowRank(recorded, of, True, False), c, products, is_eager=is_eager)
        for matrix, of in ((first, d), (second, e))
    ]
    wanted = [F.linear(x, matrix) + scale * (x @ recorded.mT + 1) @ of for matrix, of in ((first, d), (second, e))]
    agree(found[0] * found[1], wanted[0] * wanted[1], [x, first, second])


@WAYS
def test_the_output_may_be_changed_in_place_and_the_input_may_be_a_view(is_eager: bool) -> None:
    whole, matrix, bias = leaves((3, 2, 4), (5, 4), (5,))
    recorded, d, c = constants((2, 3, 4), (2, 3, 5), (2,))
    x, scale = whole.transpose(0, 1), c.view(-1, 1, 1)
    factor = LowRank(recorded, d, True, False)
    found = perturbed_linear(x, matrix, bias, factor, c, Products(), is_eager=is_eager).relu_()
    agree(found, F.relu(F.linear(x, matrix, bias) + scale * (x @ recorded.mT + 1) @ d), [whole, matrix, bias])


@WAYS
def test_frozen_weights_have_no_gradient(is_eager: bool) -> None:
    x, matrix, bias = leaves((2, 3, 4), (5, 4), (5,))
    recorded, d, c = constants((2, 3, 4), (2, 3, 5), (2,))
    factor, scale = LowRank(recorded, d, True, False), c.view(-1, 1, 1)
    matrix, bias = matrix.detach(), bias.detach()
    found = perturbed_linear(x, matrix, bias, factor, c, Products(), is_eager=is_eager)
    agree(found, F.linear(x, matrix, bias) + scale * (x @ recorded.mT + 1) @ d, [x])


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_in_half_the_memory_and_layers_in_half_precision(dtype: torch.dtype, is_eager: bool) -> None:
    x, matrix, bias = (value.detach().to(dtype).requires_grad_() for value in leaves((2, 3, 4), (5, 4), (5,)))
    recorded, d, c = constants((2, 3, 4), (2, 3, 5), (2,))
    factor = LowRank(recorded.to(dtype), d.bfloat16(), True, False)
    found = perturbed_linear(x, matrix, bias, factor, c.float(), Products(), is_eager=is_eager)
    wide = [value.detach().double().requires_grad_() for value in (x, matrix, bias)]
    product = c.view(-1, 1, 1) * (wide[0] @ factor.x.double().mT + 1)
    wanted = F.linear(*wide) + product @ factor.d.double()
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), wanted, rtol=3e-2, atol=1e-1)
    for ours, exact in zip(
        torch.autograd.grad(found.sum(), [x, matrix, bias]), torch.autograd.grad(wanted.sum(), wide), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=3e-2, atol=1e-1)


@WAYS
@pytest.mark.parametrize("shape", [(3, 4, 8), (1, 1, 2), (2, 7, 3)])
def test_a_norm_and_its_gradients(shape: tuple[int, int, int], is_eager: bool) -> None:
    n, _, h = shape
    x, weight, bias = leaves(shape, (h,), (h,))
    moves = constants((n, 1, h), (n, 1, h))
    wanted = F.layer_norm(x, (h,), eps=1e-5) * (weight + moves[0]) + bias + moves[1]
    found = perturbed_norm(x, weight, bias, (moves[0], moves[1]), 1e-5, is_eager=is_eager)
    agree(found, wanted, [x, weight, bias])


@WAYS
def test_a_norm_of_a_view(is_eager: bool) -> None:
    whole, weight, bias = leaves((5, 2, 8), (8,), (8,))
    moves, x = constants((2, 1, 8), (2, 1, 8)), whole.transpose(0, 1)
    found = perturbed_norm(x, weight, bias, (moves[0], moves[1]), 1e-5, is_eager=is_eager)
    agree(found, F.layer_norm(x, (8,)) * (weight + moves[0]) + bias + moves[1], [whole, weight, bias])


@WAYS
def test_a_norm_keeps_its_input_and_not_the_normalised_one(is_eager: bool) -> None:
    x, weight, bias = leaves((2, 5, 8), (8,), (8,))
    moves = constants((2, 1, 8), (2, 1, 8))
    kept = saved_by(lambda: perturbed_norm(x, weight, bias, (moves[0], moves[1]), 1e-5, is_eager=is_eager))
    assert len({tensor.data_ptr() for tensor in kept if tensor.numel() >= x.numel()}) == 1


@WAYS
def test_a_linear_layer_keeps_its_input_and_the_factors_only(is_eager: bool) -> None:
    x, matrix = leaves((2, 3, 4), (5, 4))
    recorded, d, c = constants((2, 3, 4), (2, 3, 5), (2,))
    factor = LowRank(recorded, d, True, False)
    kept = saved_by(lambda: perturbed_linear(x, matrix, None, factor, c, Products(), is_eager=is_eager))
    known = {value.untyped_storage().data_ptr() for value in (x, matrix, recorded, d)}
    others = [value for value in kept if value.untyped_storage().data_ptr() not in known]
    assert all(value.numel() <= c.numel() for value in others)
