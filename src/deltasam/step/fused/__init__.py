"""``w + step * direction`` for all parameters in one kernel, rounded stochastically where that is needed.

With torch's multi-tensor kernels a move is a copy and an addition, which pass five times through memory instead of
three; and they do not round. This kernel (Triton, which comes with torch) finds its tensors through a table of
addresses. A recorded step always uses the same addresses, so its table is written once, at the end of the recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from deltasam.step.branches import main_memory
from deltasam.step.rounding import STORED, Grid

_BLOCK = 4096  # elements
_MOST = 1024  # tensors of a launch
_ROOM = 9 * _MOST * 8  # numbers of a recording: eight launches, if each is full
_CODES: dict[Grid | None, int] = {None: 0, "bf16": 1, "fp16": 2, "tf32": 3}
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # as Triton names them
# How to ask what most tensors are. In this order: noise has nothing of a tensor, and a sparse tensor has no strides.
_USUAL: tuple[tuple[Callable[[Tensor], Any], Any], ...] = (
    (type, Tensor), (attrgetter("layout"), torch.strided), (attrgetter("dtype"), torch.float32),
    (Tensor.is_contiguous, True),
)  # fmt: skip
_log = logging.getLogger(__name__)

Take = Callable[[Sequence[Sequence[int]]], Tensor | None]


class Tables:
    """The tables of addresses of one recorded step; keep them as long as the step is replayed."""

    _current: Tables | None = None

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(_ROOM, dtype=torch.int64, device="cpu")
        self._device = torch.zeros(_ROOM, dtype=torch.int64, device=device)
        self._used = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Steps that are recorded inside use the tables; afterwards the tables are sent to the device."""
        before, Tables._current = Tables._current, self
        try:
            yield
        finally:
            Tables._current = before
        self.send()

    def send(self) -> None:
        """Copies the tables to the device, where the kernel reads them."""
        self._device.copy_(self._host)

    def take(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """A table with these rows, valid after the recording; None if there is no room."""
        values = torch.tensor(rows, dtype=torch.int64, device="cpu").flatten()
        before = self._used
        start = before + before % 2  # aligned to 16 bytes: Triton would compile a kernel for another alignment
        self._used = start + values.numel()
        if self._used > _ROOM:
            self._used = before
            return None
        self._host[start : self._used] = values
        return self._device[start : self._used]


def moved(
    weights: Sequence[Tensor],
    direction: Sequence[Tensor],
    step: Tensor,
    grids: Sequence[Grid | None] | None = None,
    seed: Tensor | None = None,
) -> list[Tensor | None]:
    """New tensors ``w + step * d``, and None for those that the kernel does not support.

    A zero step gives w itself, whatever the direction holds. The kernel supports dense tensors of equal strides whose
    sizes are multiples of four, in float32 or half precision, while a step is recorded by
    :class:`~deltasam.speed.capture.Captured`. ``grids`` are the grids to round to, None for no rounding; ``seed``, the
    seed of the random bits, is a scalar int64 tensor.
    """
    made: list[Tensor | None] = [None] * len(weights)
    if Tables._current is not None:
        _launch(weights, direction, made, step, grids, seed, Tables._current.take)
    return made


def mirrored(
    weights: Sequence[Tensor], direction: Sequence[Tensor], step: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """``w + step * d`` as new tensors, and ``w - step * d`` in the memory of the direction, in one pass over memory.

    None for tensors that the kernel does not support, whose direction is kept. With torch's kernels a move and its
    mirror image pass six times through memory instead of four. The second is ``2 w - (w + step * d)``, as in
    :meth:`deltasam.step.moving.Moved.mirror`, bit for bit.
    """
    plus: list[Tensor | None] = [None] * len(weights)
    minus: list[Tensor | None] = [None] * len(weights)
    if Tables._current is not None and can_mirror(step.device):
        for k in _launch(weights, direction, plus, step, None, None, Tables._current.take, "mirrored_move_kernel"):
            minus[k] = direction[k]
    return plus, minus


def add_(
    weights: Sequence[Tensor],
    direction: Sequence[Tensor],
    step: Tensor,
    grids: Sequence[Grid | None],
    seed: Tensor,
) -> set[int]:
    """``w += step * d`` in place, rounded, in a step that is not recorded; returns the indices of what was moved."""
    if not is_ready(step.device):
        return set()
    return set(_launch(weights, direction, list(weights), step, grids, seed, sent_to(step.device)))


def sent_to(device: torch.device) -> Take:
    """Makes tables of addresses, outside a recording, and sends them to the device at once."""

    def sent(rows: Sequence[Sequence[int]]) -> Tensor:
        # Pinned, so that the copy is asynchronous; torch keeps the memory until the copy is done.
        pinned = device.type == "cuda"
        table = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=pinned).flatten()
        return table.to(device, non_blocking=True)

    return sent


def _launch(
    weights: Sequence[Tensor],
    direction: Sequence[Tensor],
    outs: list[Tensor | None],
    step: Tensor,
    grids: Sequence[Grid | None] | None,
    seed: Tensor | None,
    take: Take,
    kernel: str = "move_kernel",
) -> list[int]:
    """Launches the kernel over the tensors that it supports, fills in missing outputs, and returns the indices."""
    if step.dtype is not torch.float32 or not _is_aligned(step):
        return []
    grids = [None] * len(weights) if grids is None else grids
    fits = _fitting(weights, direction, grids, step.device)
    done = []
    for dtype in dict.fromkeys(weights[k].dtype for k in fits):
        alike = [k for k in fits if weights[k].dtype is dtype]
        for start in range(0, len(alike), _MOST):
            some = alike[start : start + _MOST]
            with main_memory(step.device):
                into = [torch.empty_like(weights[k]) if (out := outs[k]) is None else out for k in some]
            w, d = ([each[k] for k in some] for each in (weights, direction))
            launch = _launcher(kernel, take, w, d, into, step, [grids[k] for k in some], seed)
            if launch is not None:
                launch()
                done.extend(some)
                for k, out in zip(some, into, strict=True):
                    outs[k] = out
    return done


def _fitting(
    weights: Sequence[Tensor], direction: Sequence[Tensor], grids: Sequence[Grid | None], device: torch.device
) -> list[int]:
    """The indices of the tensors that the kernel supports; of float32 in one sweep, because eager steps ask again."""
    both = [*weights, *direction]
    usual = all(set(map(read, both)) == {answer} for read, answer in _USUAL)  # in this order, until one is not
    if not usual or {t.device for t in both} != {device}:
        pairs = enumerate(zip(weights, direction, strict=True))
        return [k for k, (w, d) in pairs if _fits(w, d, grids[k], device)]
    starts = list(map(Tensor.data_ptr, both))
    each = zip(map(Tensor.numel, weights), starts, starts[len(weights) :], strict=False)
    return [k for k, (size, w, d) in enumerate(each) if size and not size % 4 and not (w | d) % 16]


def _fits(w: Tensor, d: Tensor, grid: Grid | None, device: torch.device) -> bool:
    alike = all(type(t) is Tensor and t.dtype is w.dtype and t.device == device for t in (w, d))
    if not alike or w.dtype not in _TYPES or (w.dtype in STORED and grid is None):
        return False
    if d.is_sparse or not w.numel() or w.numel() % 4:
        return False
    return is_dense(w) and d.stride() == w.stride() and _is_aligned(w) and _is_aligned(d)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps, in any order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _launcher(
    kernel: str,
    take: Take,
    weights: Sequence[Tensor],
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    step: Tensor,
    grids: Sequence[Grid | None],
    seed: Tensor | None,
    *columns: Sequence[int],
) -> Callable[[], None] | None:
    """Writes the table of a kernel, seven columns and perhaps more, and returns a function that launches it."""
    sizes = list(map(Tensor.numel, weights))
    blocks = [-(-size // _BLOCK) for size in sizes]
    ends = list(accumulate(blocks))
    begins = [end - own for end, own in zip(ends, blocks, strict=True)]
    addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in (weights, sources, outs)]
    codes = [_CODES[grid] for grid in grids]
    table = take([ends, begins, sizes, *addresses, codes, *columns])
    if table is None:
        return None
    module = import_module("deltasam.step.fused._kernel")
    options = {
        "DTYPE": getattr(module.tl, _TYPES[weights[0].dtype]), "ROUND": seed is not None and any(grids),
        "MOST": _MOST, "BLOCK": _BLOCK, "num_warps": 8,
    }  # fmt: skip

    def launch() -> None:
        # Triton launches on the current device.
        with torch.cuda.device(step.device) if step.is_cuda else nullcontext():
            run = getattr(module, kernel)[(ends[-1],)]
            run(table, step, step if seed is None else seed, len(weights), **options)

    return launch


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel runs on this device. The first call compiles it, which a recording would not survive."""
    if device.type != "cuda":
        return False
    try:
        ready = works(device)
    except Exception as why:  # noqa: BLE001 - no Triton, no compiler, an unknown device: fall back to torch's kernels
        _log.info("the fused kernel for perturbations cannot be used on %s: %s", device, why)
        return False
    if ready:
        can_mirror(device)  # compiles that kernel, too
    return ready


@cache
def can_mirror(device: torch.device) -> bool:
    """Whether the kernel of :func:`mirrored` runs on this device; :func:`is_ready` calls it before a recording."""
    try:
        return mirrors(device)
    except Exception as why:  # noqa: BLE001 - as above
        _log.warning("moves to w + r and w - r take two kernels on %s, because the fused one failed: %s", device, why)
        return False


def mirrors(device: torch.device) -> bool:
    """Compares the kernel for both sides of w with torch; the two sides are symmetric, bit for bit."""
    weights, direction = _examples(device, torch.float32)
    for size in (0.5, 0.0):
        tables, minus = Tables(device), [d.clone() for d in direction]
        plus, step = [torch.empty_like(w) for w in weights], torch.tensor(size, device=device)
        grids = [None] * len(weights)
        launch = _launcher("mirrored_move_kernel", tables.take, weights, minus, plus, step, grids, None)
        assert launch is not None
        tables.send()
        launch()
        for w, d, p, m in zip(weights, direction, plus, minus, strict=True):
            wanted = w if size == 0 else w + size * d
            if not torch.allclose(p, wanted, rtol=1e-6, atol=1e-6) or not torch.equal(m, w + (w - p)):
                return False
    return True


def works(device: torch.device) -> bool:
    """Compares the kernel with torch: several tensors, a block that is not full, a zero step, all grids."""
    return all(_moves(device, dtype, grid) for dtype, grid in _KINDS)


_KINDS: tuple[tuple[torch.dtype, Grid | None], ...] = (
    (torch.float32, None), (torch.float32, "bf16"), (torch.float32, "fp16"), (torch.float32, "tf32"),
    (torch.bfloat16, "bf16"), (torch.float16, "fp16"),
)  # fmt: skip


def _moves(device: torch.device, dtype: torch.dtype, grid: Grid | None) -> bool:
    """Whether a move is right within one spacing of the grid, and a zero move is exactly zero."""
    weights, direction = _examples(device, dtype)
    direction[1][5] = float("inf")
    seed = torch.tensor(7, dtype=torch.int64, device=device)
    spacing = 1e-6 if grid is None else 2.0**-7 if grid == "bf16" else 2.0**-10
    for size in (0.5, 0.0):
        tables, outs = Tables(device), [torch.empty_like(w) for w in weights]
        grids = [grid] * len(weights)
        step = torch.tensor(size, device=device)
        launch = _launcher("move_kernel", tables.take, weights, direction, outs, step, grids, seed)
        assert launch is not None
        tables.send()
        launch()
        wanted = [
            w.float() if size == 0 else w.float() + size * d.float() for w, d in zip(weights, direction, strict=True)
        ]
        tolerance = 0.0 if size == 0 else 1.5 * spacing
        pairs = zip(outs, wanted, strict=True)
        if not all(torch.allclose(a.float(), b, rtol=tolerance, atol=tolerance) for a, b in pairs):
            return False
    return True


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Some weights and directions."""
    generator = torch.Generator().manual_seed(0)
    sizes = (8, _BLOCK, 2 * _BLOCK + 12)
    weights, direction = (
        [torch.randn(n, generator=generator, device="cpu").to(device, dtype) for n in sizes] for _ in range(2)
    )
    return weights, direction
