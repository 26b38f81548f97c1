"""Compares the operations of the perturbed pass with formulas that autograd differentiates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.per_instance.algebra.operations import add_product


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 1, 1), (2, 7, 3)])
def test_add_product_is_baddbmm(shape: tuple[int, int, int]) -> None:
    n, s, out = shape
    layer = nn.Linear(6, out).double()
    x, a = leaves((n, s, 6), (n, s, s))
    d = torch.randn(n, s, out, dtype=torch.float64)
    wanted = torch.baddbmm(layer(x), a, d)
    found = add_product(layer(x), a, d)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    targets = [x, a, layer.weight, layer.bias]
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), targets),
                               torch.autograd.grad((wanted * weights).sum(), targets))  # fmt: skip


def test_add_product_uses_the_memory_of_the_layer() -> None:
    y = F.linear(torch.randn(2, 3, 4), torch.randn(5, 4, requires_grad=True))
    found = add_product(y, torch.randn(2, 3, 3), torch.randn(2, 3, 5))
    assert found.data_ptr() == y.data_ptr()
    assert not found._is_view()


def test_the_sum_may_be_changed_in_place_by_the_model() -> None:
    layer = nn.Linear(4, 5).double()
    x, a = leaves((2, 3, 4), (2, 3, 3))
    d = torch.randn(2, 3, 5, dtype=torch.float64)
    wanted = torch.autograd.grad(F.relu(torch.baddbmm(layer(x), a, d)).sum(), [x, a])
    found = torch.autograd.grad(add_product(layer(x), a, d).relu_().sum(), [x, a])
    torch.testing.assert_close(found, wanted)


def test_a_less_precise_factor_rounds_the_product_only() -> None:
    layer = nn.Linear(4, 5)
    x = torch.randn(2, 3, 4, requires_grad=True)
    a = (1e-3 * torch.randn(2, 3, 3)).requires_grad_()  # small: y must keep digits that bfloat16 does not have
    d = torch.randn(2, 3, 5)
    y = layer(x).detach()
    found = add_product(layer(x), a.bfloat16(), d.bfloat16())
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, y + torch.bmm(a, d), rtol=0, atol=1e-4)
    assert not torch.allclose(found, y.bfloat16() + torch.bmm(a, d), rtol=0, atol=1e-4)
    (of_x, of_a) = torch.autograd.grad(found.sum(), [x, a])
    torch.testing.assert_close(of_x, torch.autograd.grad(layer(x).sum(), x)[0])
    torch.testing.assert_close(of_a, d.sum(2, keepdim=True).mT.expand(2, 3, 3), rtol=2e-2, atol=5e-2)
