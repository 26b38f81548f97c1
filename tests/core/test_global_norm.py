"""The norm that every radius is measured by, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltasam.perturb import global_norm


def exact(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()


@pytest.mark.parametrize("shape", [(2**23,), (2**15, 2**8), (2**4, 2**19)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_many_entries_lose_no_digits(shape: tuple[int, ...], transposed: bool) -> None:
    """torch's own norm of so many float32 numbers is off by 6e-4 on a CPU: it adds them one after the other."""
    table = torch.randn(shape)
    found = [table.mT if transposed and table.ndim > 1 else table, torch.randn(3, 2)]
    for tensors in (found, found[:1]):
        assert float(abs(global_norm(tensors) / exact(tensors) - 1)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_scalars_and_what_is_empty(dtype: torch.dtype) -> None:
    tensors = [torch.randn(300, 400).to(dtype), torch.tensor(3.0, dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    found = global_norm(tensors)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert float(found) == pytest.approx(float(exact(tensors)), rel=1e-5)


def test_what_is_not_finite_is_not_hidden() -> None:
    tensors = [torch.randn(2**18), torch.randn(4)]
    tensors[0][-1] = float("inf")
    assert not torch.isfinite(global_norm(tensors))
    tensors[0][-1] = float("nan")
    assert not torch.isfinite(global_norm(tensors))
