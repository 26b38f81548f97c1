"""``deltasam.step.fused.instances``: one tensor per group, rounded stochastically with the right mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltasam.step.fused import instances
from deltasam.step.rounding import nearest

SPACING = {"bf16": 2.0**-7, "tf32": 2.0**-10}  # of numbers between 1 and 2


def drawn(grid: Any, move: float, size: int = 200_000) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = nearest(1 + 0.9 * torch.rand(size, generator=generator), grid)
    d = torch.randn(2, size, generator=generator).abs()
    return w, d, torch.tensor([move, 2 * move])


@pytest.mark.parametrize("grid", ["bf16", "tf32"])
@pytest.mark.parametrize("share", [0.004, 0.1, 0.7])
def test_the_mean_is_the_move(grid: Any, share: float) -> None:
    w, d, c = drawn(grid, share * SPACING[grid])
    found = instances.by_torch(w, d, c, grid)
    assert torch.equal(nearest(found, grid), found)
    moved = (found - w).double()
    meant = c.double().unsqueeze(1) * d.double()
    assert ((moved - meant).abs() <= SPACING[grid] * 1.01).all()
    by_size = meant[0].argsort().view(4, -1)  # also where the move is small and where it is large
    for mine, wanted in zip([*moved, *moved[0][by_size]], [*meant, *meant[0][by_size]], strict=True):
        deviation = (wanted.mean() * SPACING[grid] / wanted.numel()) ** 0.5  # at most, of the mean of so many draws
        assert float((mine.mean() - wanted.mean()).abs()) < 4.5 * float(deviation)


def test_groups_and_neighbours_are_rounded_independently() -> None:
    """Equal weights and equal moves: the bits come from the position and the group as well."""
    w, c = torch.ones(100_000), torch.full((4,), 1.0)
    d = torch.full((4, 100_000), 0.5 * SPACING["bf16"])
    up = (instances.by_torch(w, d, c, "bf16") > 1).double()
    assert (up.mean(1) - 0.5).abs().max() < 0.01
    between = torch.corrcoef(up)
    assert (between - torch.eye(4)).abs().max() < 0.02
    for lag in (1, 2, 64, 768):
        pairs = torch.stack([up[0, :-lag], up[0, lag:]])
        assert float(torch.corrcoef(pairs)[0, 1].abs()) < 0.02


@pytest.mark.parametrize("grid", ["bf16", "tf32"])
def test_nothing_moves_where_nothing_is_added(grid: Any) -> None:
    w, d, c = drawn(grid, 0.1, 1000)
    d[0, ::2] = 0
    c[1] = 0
    d[1, 3] = float("inf")
    found = instances.by_torch(w, d, c, grid)
    assert torch.equal(found[0, ::2], w[::2])
    assert torch.equal(found[1], w)
    assert torch.equal(found, instances.by_torch(w, d, c, grid))  # and a repeated pass is the same


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_shapes_dtypes_and_memory(stored: torch.dtype) -> None:
    w, d, c = torch.randn(5, 7).to(stored), torch.randn(3, 5, 7).bfloat16(), torch.rand(3)
    found = instances.own(w, d, c, "bf16")
    assert (found.shape, found.dtype) == (d.shape, torch.bfloat16)
    torch.testing.assert_close(found.float(), w.float() + c.view(3, 1, 1) * d.float(), rtol=2.0**-6, atol=2.0**-7)
    assert instances.own(w, d, c, "bf16", out=d) is d
    assert torch.equal(d, found)
    wide = torch.randn(3, 5, 7)
    assert instances.own(w.float(), wide, c, "tf32").dtype is torch.float32
    vector, rows = torch.randn(6), torch.randn(3, 10)[:, 2:8]  # columns of a pack
    torch.testing.assert_close(
        instances.own(vector, rows, c, "tf32"), vector + c.view(3, 1) * rows, rtol=2.0**-9, atol=2.0**-10
    )


def test_the_kernel_is_for_cuda_only() -> None:
    assert not instances.is_ready(torch.device("cpu"))


@pytest.mark.gpu
def test_the_kernel_is_the_definition() -> None:
    assert instances.works(torch.device("cuda"))
    assert instances.is_ready(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("grid", ["bf16", "tf32"])
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (5, 7)])
def test_the_kernel_on_matrices(grid: Any, shape: tuple[int, int]) -> None:
    dtype = torch.bfloat16 if grid == "bf16" else torch.float32
    w = torch.randn(shape, device="cuda") / 25
    d = torch.randn(4, *shape, device="cuda").to(dtype)
    c = torch.tensor([1e-6, 0.0, 1e-3, 1.0], device="cuda")
    wanted = instances.by_torch(w, d, c, grid)
    found = instances.own(w, d, c, grid, out=d)
    assert found is d
    off = (found.float() - wanted).abs()
    assert (off <= SPACING[grid] * wanted.abs().clamp_min(1e-6)).all()
    assert float((off > 0).float().mean()) < 0.01
