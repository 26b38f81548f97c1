"""``deltasam.step.fused.rows``: biases and layer norms of perturbed layers in one pass over memory."""

from __future__ import annotations

import pytest
import torch

from deltasam.step.fused import rows

KINDS = {"bias": (torch.bfloat16, torch.float32), "bias32": (torch.float32, torch.float32),
         "norm": (torch.float32, torch.float32)}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 768, 1000, 3072])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_agree_with_torch(kind: str, columns: int) -> None:
    dtype, of_vector = KINDS[kind]
    like = torch.randn(2, 3, columns, device="cuda", dtype=dtype)
    vector = torch.randn(columns, device="cuda", dtype=of_vector)
    name = kind.removesuffix("32")
    rows.warm(name, like, vector)
    assert rows.is_warm(name, like, vector)


@pytest.mark.gpu
def test_a_long_norm_is_as_exact_as_that_of_torch() -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(4, 128, 768, device="cuda"), torch.randn(4, 128, 768, device="cuda")
    scale, shift = torch.randn(4, 1, 768, device="cuda"), torch.randn(4, 1, 768, device="cuda")
    wide = x.double().requires_grad_()
    wanted = torch.layer_norm(wide, (768,), None, None, 1e-12) * scale.double() + shift.double()
    (of_x,) = torch.autograd.grad(wanted, wide, gradient.double())
    found, means, factors = rows.norm(x, scale, shift, 1e-12)
    mine = rows.norm_backward(gradient, x, scale, means, factors)
    assert (found - wanted).norm() / wanted.norm() < 1e-6
    assert (mine - of_x).norm() / of_x.norm() < 1e-6


def test_nothing_is_used_on_a_cpu() -> None:
    like, vector = torch.randn(2, 3, 8), torch.randn(8)
    rows.warm("bias", like, vector)
    assert not rows.is_warm("bias", like, vector)
