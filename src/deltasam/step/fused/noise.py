"""Noise that is drawn while it is added to the weights: it is never stored, and takes one pass through memory.

Drawn first, scaled by rows and then added, the noise of a model would pass through memory four times more, and take
as much memory as the weights. The Triton kernel draws four normal numbers from one call of the generator (Philox).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deltasam.step import fused
from deltasam.step.fused import _BLOCK, _KINDS, _MOST, _TYPES, Tables, Take, _is_aligned, _launcher, sent_to
from deltasam.step.rounding import STORED, Grid


@dataclass(frozen=True)
class Noise:
    r"""A direction that is not drawn yet: :math:`d_{jk} = s_j z_{jk}`, with :math:`z \sim N(0, I)`.

    Attributes:
        scales: s in float32: one number per row (or per column), or one for the whole tensor.
        columns: The number of entries of a row; of a whole tensor, all of them.
        by_column: Whether the scales belong to the columns.
        seed: A scalar int64 tensor on the device, so that every replay of a recorded step can draw other noise. All
            parameters of a step share it.
    """

    scales: Tensor
    columns: int
    by_column: bool
    seed: Tensor


def supports(w: Tensor) -> bool:
    """Whether the kernel can add noise to a tensor, on a device where :func:`is_ready`."""
    if type(w) is not Tensor or w.dtype not in _TYPES or not w.numel() or w.numel() % 4 or w.numel() >= 2**31:
        return False
    return w.is_contiguous() and _is_aligned(w)


def fill(
    weights: Sequence[Tensor],
    noises: Sequence[Noise],
    outs: Sequence[Tensor],
    step: Tensor,
    grids: Sequence[Grid | None],
    take: Take | None = None,
) -> None:
    """Writes ``w + step * noise`` to ``outs``, which may be the weights; rounded stochastically where there is a grid.

    Args:
        weights: Tensors for which :func:`supports` is true; half precision needs its grid.
        noises: The noise of each.
        outs: Where to write.
        step: A float32 scalar on the device; zero copies w.
        grids: The grid of each, None for no rounding.
        take: Makes the table of addresses; by default it is sent to the device, and while a step is recorded by
            :class:`~deltasam.speed.capture.Captured` it is that of the recording.

    Raises:
        RuntimeError: A recording has no room for so many tensors.
    """
    recording = Tables._current
    take = take or (sent_to(step.device) if recording is None else recording.take)
    for number, some in enumerate(_launches(weights)):
        chosen = [noises[k] for k in some]
        launch = _launcher(
            "noise_kernel",
            take,
            [weights[k] for k in some],
            [noise.scales for noise in chosen],
            [outs[k] for k in some],
            step,
            [grids[k] for k in some],
            chosen[0].seed + 2 * _MOST * number,  # each tensor of a launch has two streams
            [noise.columns for noise in chosen],
            [int(noise.by_column) for noise in chosen],
        )
        if launch is None:
            raise RuntimeError(f"a recording has no room for the addresses of {len(weights)} tensors")
        launch()


def _launches(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """The indices of tensors that one launch can take: of one dtype, and not too many."""
    for dtype in dict.fromkeys(w.dtype for w in weights):
        alike = [k for k, w in enumerate(weights) if w.dtype is dtype]
        yield from (alike[start : start + _MOST] for start in range(0, len(alike), _MOST))


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel runs on this device. The first call compiles it, which a recording would not survive."""
    if not fused.is_ready(device):
        return False
    try:
        return works(device)
    except Exception:  # noqa: BLE001 - a compiler that fails on this kernel: draw the noise with torch
        return False


def works(device: torch.device) -> bool:
    """Compares the kernel with its definition: rows, columns and whole tensors, all grids, a zero step."""
    return all(_adds(device, dtype, grid) for dtype, grid in _KINDS)


def _adds(device: torch.device, dtype: torch.dtype, grid: Grid | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 516), (512, 8), (2 * _BLOCK + 12,))
    weights = [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes]
    seed = torch.tensor(2**40 + 7, dtype=torch.int64, device=device)
    eight = torch.arange(1.0, 9.0, device=device)
    scales = [eight, eight, torch.ones(1, device=device)]
    kinds = ((516, False), (8, True), (shapes[2][0], False))
    noises = [Noise(scale, *kind, seed) for scale, kind in zip(scales, kinds, strict=True)]
    grids = [grid or STORED.get(dtype)] * 3

    def added(size: float) -> list[Tensor]:
        outs = [torch.empty_like(w) for w in weights]
        fill(weights, noises, outs, torch.tensor(size, device=device), grids, sent_to(device))
        return outs

    if not all(torch.equal(out, w) for out, w in zip(added(0.0), weights, strict=True)):
        return False
    found = added(100.0)  # far above the spacing of the grids
    moves = [(out.float() - w.float()) / 100 for out, w in zip(found, weights, strict=True)]
    z = torch.cat([(moves[0] / scales[0][:, None]).flatten(), (moves[1] / scales[1]).flatten(), moves[2]])
    spread = (z.view(-1, 4).square().mean(0) - 1).abs().max()
    inside = (z.abs() < 1).float().mean()
    repeated = 1 - len(set(z.tolist())) / z.numel()
    again = all(torch.equal(a, b) for a, b in zip(found, added(100.0), strict=True))
    near = abs(float(z.mean())) < 0.05 and float(spread) < 0.12 and abs(float(inside) - 0.6827) < 0.03
    return again and near and (repeated < 0.01 or dtype is not torch.float32 or grid is not None)
