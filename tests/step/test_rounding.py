"""Stochastic rounding has the right mean, stays on the grid, and is exact where there is nothing to round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltasam.step.moving import perturbed
from deltasam.step.randomness import Seed
from deltasam.step.rounding import Grid, add_rounded, nearest

GRIDS: list[Grid] = ["bf16", "fp16", "tf32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
grids = pytest.mark.parametrize("grid", GRIDS)


def weights() -> Tensor:
    """All sizes: zero, powers of two and their neighbours, subnormal numbers of float16, both signs."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.9999, 1e-3, 3e-5, 1e-6, 0.0371, 7.5])
    return torch.cat([sizes, -sizes])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@grids
@pytest.mark.parametrize("share", [1e-3, 0.3, 3.0])
def test_the_mean_over_many_seeds_is_the_move(grid: Grid, share: float) -> None:
    w = nearest(weights(), grid)
    move = share * 2.0**-9 * torch.where(w == 0, torch.tensor(1e-3), w.abs())
    draws = 20_000
    many = add_rounded(w.repeat(draws, 1), move.repeat(draws, 1), grid, generator(1)).double()
    # At a share p of the way between two neighbours the variance is p (1 - p). The target is w + move in float32.
    low, high, meant = many.amin(0), many.amax(0), (w + move).double()
    spacing = torch.maximum(high - low, (meant.abs() * 2.0 ** (-7 if grid == "bf16" else -10)))
    error = (spacing * (meant - low).abs()).sqrt() / draws**0.5
    assert bool(((many.mean(0) - meant).abs() <= 5 * error + 1e-12).all())


@grids
def test_the_result_is_a_neighbour_of_the_target_on_the_grid(grid: Grid) -> None:
    w = torch.randn(2000) * torch.logspace(-7, 1, 2000)
    move = 0.01 * torch.randn(2000) * w.abs()
    found = add_rounded(w, move, grid, generator(0))
    assert torch.equal(nearest(found, grid), found)
    target = nearest(w, grid) + move
    spacing = torch.maximum(target.abs() * 2.0 ** (-7 if grid == "bf16" else -10), torch.tensor(2.0**-24))
    assert bool(((found - target).abs() <= spacing).all())


@grids
def test_entries_that_do_not_move_keep_their_values(grid: Grid) -> None:
    w = torch.randn(100)
    assert torch.equal(add_rounded(w, torch.zeros(100), grid, generator(0)), w)


@pytest.mark.parametrize("grid", ["bf16", "fp16"])
def test_stored_weights_keep_their_dtype_and_move_as_float32_ones_do(grid: Grid) -> None:
    w, move = torch.randn(500).to(DTYPES[grid]), 1e-3 * torch.randn(500)
    found = add_rounded(w, move, grid, generator(0))
    assert found.dtype is DTYPES[grid]
    assert torch.equal(found.float(), add_rounded(w.float(), move, grid, generator(0)))


def test_nearest_equals_a_cast() -> None:
    w = torch.randn(1000) * torch.logspace(-6, 2, 1000)
    assert torch.equal(nearest(w, "bf16"), w.bfloat16().float())
    assert torch.equal(nearest(w, "fp16"), w.half().float())
    tf32 = nearest(w, "tf32")
    assert bool(((tf32 - w).abs() <= w.abs() * 2.0**-11).all())
    assert bool((tf32.view(torch.int32) & 0x1FFF == 0).all())


def test_the_random_bits_depend_on_the_seed_and_the_position() -> None:
    found = []
    for seed in (Seed(0, 1), Seed(0, 1), Seed(0, 2)):
        params = [torch.nn.Parameter(torch.ones(1000)), torch.nn.Parameter(torch.ones(1000))]
        direction = [torch.full((1000,), 1e-3) for _ in params]
        with perturbed(params, direction, torch.tensor(1.0), grids=["bf16", "bf16"], seed=seed):
            found.append([p.detach().clone() for p in params])
        assert all(bool((p == 1).all()) for p in params)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[0][0], found[2][0])
