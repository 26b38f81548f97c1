"""Stochastic rounding: with few bits, a small move of the weights arrives in the mean instead of being lost.

Autocast rounds float32 weights to bfloat16 or float16, to nearest, and TF32 keeps 10 of their 23 bits. A perturbation
of SAM's size is far smaller than the spacing of these grids, and pretrained weights are *on* them: the values of a
bfloat16 checkpoint are bfloat16 values, so rounding to nearest removes most of the move; those of a float16 checkpoint
are often half-way between two bfloat16 values, so an arbitrarily small move changes an entry by a whole spacing.

Rounding up with the probability of the part that is cut off has the right mean for every entry, and the cast that
follows is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Grid = Literal["bf16", "fp16", "tf32"]

STORED: dict[torch.dtype, Grid] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CUT = {"bf16": 16, "fp16": 13, "tf32": 13}  # bits of a float32 number that the grid does not have
_FP16_NORMAL, _FP16_SPACING = 2.0**-14, 2.0**-24  # below the first, float16 values are equally spaced


@dataclass(frozen=True)
class Rounding:
    """How to round a move."""

    grids: list[Grid | None]  #: of each tensor, None if it is used as it is stored
    generators: dict[torch.device, torch.Generator]  #: of each device that holds a tensor with a grid

    def of(self, which: Sequence[int]) -> Rounding:
        """The same, for some of the tensors."""
        return Rounding([self.grids[k] for k in which], self.generators)


def nearest(values: Tensor, grid: Grid) -> Tensor:
    """The values as a cast to the grid gives them, in float32.

    Example:
        >>> nearest(torch.tensor([1.0, 1.001, 1.005]), "bf16")
        tensor([1.0000, 1.0000, 1.0078])
    """
    if grid == "tf32":  # to nearest, ties away from zero, as the conversion instruction does
        half = 1 << (_CUT[grid] - 1)
        return _without_low_bits((values.float().view(torch.int32) + half), grid)
    return values.to(torch.bfloat16 if grid == "bf16" else torch.float16).float()


def add_rounded(weights: Tensor, move: Tensor, grid: Grid, generator: torch.Generator) -> Tensor:
    r"""``weights + move`` on the grid, rounded stochastically.

    .. math:: \text{round}(q + \epsilon), \qquad q = \text{nearest}(w), \qquad
              P(\text{up}) = \text{the part of the spacing that is cut off}

    The move starts at q, the values that the pass at w has used; so the mean over the random bits is exactly the move.
    An entry with a move of zero keeps its value w. The weights are in float32 or in the dtype of the grid, the move is
    float32 and dense; the result is a new tensor with the dtype of the weights.

    Extra memory: three times the tensor in float32, during the call.

    Example:
        >>> w, generator = torch.ones(1_000_000), torch.Generator().manual_seed(0)
        >>> moved = add_rounded(w, torch.full_like(w, 1e-4), "bf16", generator)
        >>> sorted(set(moved.tolist())), round(float((moved - w).mean()), 5)  # two neighbours of the grid
        ([1.0, 1.0078125], 0.0001)
    """
    target = nearest(weights, grid).add_(move)
    bits = torch.empty_like(target, dtype=torch.int32).random_(generator=generator)  # 31 random bits
    rounded = _without_low_bits(target.view(torch.int32) + (bits & _low_bits(grid)), grid)
    if grid == "fp16":
        share = (bits & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)
        small = target.div(_FP16_SPACING).add_(share).floor_().mul_(_FP16_SPACING)
        rounded = torch.where(target.abs() < _FP16_NORMAL, small, rounded)
    return torch.where(move == 0, weights, rounded.to(weights.dtype))


def _low_bits(grid: Grid) -> int:
    return (1 << _CUT[grid]) - 1


def _without_low_bits(bits: Tensor, grid: Grid) -> Tensor:
    return (bits & ~_low_bits(grid)).view(torch.float32)
