r"""``w + c_g d_g`` for every group g of a batch, rounded stochastically, in one pass over memory.

.. math:: \text{round}(q + c_g d_g), \qquad q = \text{nearest}(w), \qquad
          P(\text{up}) = \text{the part of the spacing that is cut off}

as :func:`deltasam.step.rounding.add_rounded` does for the weights of SAM. There are G times as many numbers here, so
the random bits are a cheap hash of the position and of the number that is added: no random stream is used, and a
repeated pass is the same.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from deltasam.step.rounding import nearest

Grid = Literal["bf16", "tf32"]

_BLOCK = 1024  # elements
_CUT: dict[Grid, int] = {"bf16": 0xFFFF, "tf32": 0x1FFF}  # the bits of float32 that the grid does not have
_log = logging.getLogger(__name__)


def own(shared: Tensor, moves: Tensor, c: Tensor, grid: Grid, out: Tensor | None = None) -> Tensor:
    r"""The tensors ``shared + c_g moves_g`` on the grid, (G, \*shape), with the right mean.

    Args:
        shared: In float32 or bfloat16, of any shape.
        moves: (G, \*shape) in float32 or bfloat16.
        c: (G,) in float32; a group with zero gets ``shared``, whatever its move holds.
        grid: The grid, which the dtype of the result can hold: bfloat16 for bf16, float32 for tf32.
        out: Where to write, contiguous; it may be ``moves``. By default a new tensor.
    """
    if out is None:
        dtype = torch.bfloat16 if grid == "bf16" else torch.float32
        out = torch.empty(moves.shape, dtype=dtype, device=moves.device)
    plain = all(type(t) is Tensor for t in (shared, moves))
    if not plain or not is_ready(moves.device) or not shared.is_contiguous() or not moves[0].is_contiguous():
        return out.copy_(by_torch(shared, moves, c, grid))
    _launch(shared, moves, c, grid, out)
    return out


def by_torch(shared: Tensor, moves: Tensor, c: Tensor, grid: Grid) -> Tensor:
    """The definition, in float32, with several passes over memory."""
    start = nearest(shared, grid).flatten()
    d = moves.float().flatten(1)
    at, groups = (torch.arange(n, dtype=torch.int32, device=d.device) for n in reversed(d.shape))
    hashed = at * 0x1E3779B1 + groups.unsqueeze(1) * 0x27D4EB2F + d.view(torch.int32) * 0x05EBCA6B
    hashed = ((hashed ^ (hashed >> 15)) * 0x2C1B3C6D) >> 9
    target = (start + c.float().unsqueeze(1) * d).view(torch.int32)
    value = ((target + (hashed & _CUT[grid])) & ~_CUT[grid]).view(torch.float32)
    return torch.where((c == 0).unsqueeze(1), start, value).view(moves.shape)


def _launch(shared: Tensor, moves: Tensor, c: Tensor, grid: Grid, out: Tensor) -> None:
    kernel = import_module("deltasam.step.fused._kernel").own_kernel
    blocks = -(-shared.numel() // _BLOCK)
    with torch.cuda.device(moves.device) if moves.is_cuda else nullcontext():  # Triton launches on the current device
        kernel[(blocks, moves.shape[0])](
            shared, moves, c, out, shared.numel(), moves.stride(0), BF16=grid == "bf16", BLOCK=_BLOCK, num_warps=4
        )


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel runs on this device. The first call compiles it, which a recording would not survive."""
    if device.type != "cuda":
        return False
    try:
        return works(device)
    except Exception as why:  # noqa: BLE001 - no Triton, no compiler, an unknown device: multiply in another way
        _log.info("the kernel for perturbed matrices cannot be used on %s: %s", device, why)
        return False


def works(device: torch.device) -> bool:
    """Compares the kernel with its definition: both grids, a block that is not full, rows with gaps, a zero step."""
    generator = torch.Generator().manual_seed(0)
    for grid, dtype, stored in (("bf16", torch.bfloat16, torch.float32), ("bf16", torch.bfloat16, torch.bfloat16),
                                ("tf32", torch.float32, torch.float32)):  # fmt: skip
        shared = torch.randn(2 * _BLOCK + 5, generator=generator, device="cpu").to(device, stored)
        moves = torch.randn(3, 2 * _BLOCK + 16, generator=generator, device="cpu").to(device, dtype)[
            :, : 2 * _BLOCK + 5
        ]
        c = torch.tensor([0.3, 0.0, 1e-4], device=device)
        wanted = by_torch(shared, moves, c, grid)  # type: ignore[arg-type]
        found = torch.empty(moves.shape, dtype=dtype, device=device)
        _launch(shared, moves, c, grid, found)  # type: ignore[arg-type]
        # A fused multiplication and addition rounds once, so a few sums fall on the other side.
        off = (found.float() - wanted).abs()
        spacing = 2.0**-7 if grid == "bf16" else 2.0**-10
        near = bool((off <= spacing * wanted.abs().clamp_min(1e-6)).all())
        if not near or float((off > 0).float().mean()) > 0.01 or not torch.equal(found[1].float(), wanted[1]):
            return False
    return True
