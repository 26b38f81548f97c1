"""``w + step * direction`` for all parameters in one kernel, while a CUDA graph is recorded.

Torch's own multi-tensor kernels take two of them for it, a copy and an addition: five trips through memory where three
are enough. The kernel (Triton, which comes with torch) finds its tensors through a table of addresses. A recorded step
uses the same addresses for ever, so the table is written once, when the recording is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from itertools import accumulate

import torch
from torch import Tensor

_BLOCK = 4096  # elements
_MOST = 1024  # tensors of a launch
_ROOM = 6 * _MOST * 8  # numbers of a recording: eight launches, if each is full
_log = logging.getLogger(__name__)


class Tables:
    """The tables of addresses of one recorded step; to be kept as long as the step is replayed.

    Args:
        device: Where the step runs.
    """

    _current: Tables | None = None

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(_ROOM, dtype=torch.int64, device="cpu")
        self._device = torch.zeros(_ROOM, dtype=torch.int64, device=device)
        self._used = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is recorded inside may use the tables; afterwards they are sent to the device."""
        before, Tables._current = Tables._current, self
        try:
            yield
        finally:
            Tables._current = before
        self.send()

    def send(self) -> None:
        """Puts the tables where the kernel reads them."""
        self._device.copy_(self._host)

    def take(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """A table of these rows, valid when the recording is over; None if there is no room."""
        values = torch.tensor(rows, dtype=torch.int64, device="cpu").flatten()
        start, self._used = self._used, self._used + values.numel()
        if self._used > _ROOM:
            self._used = start
            return None
        self._host[start : self._used] = values
        return self._device[start : self._used]


def moved(weights: Sequence[Tensor], direction: Sequence[Tensor], step: Tensor) -> list[Tensor | None]:
    """New tensors ``w + step * d``, and None for those that the kernel does not take.

    A zero step gives w itself, whatever the direction holds. The kernel takes dense float32 tensors of one layout
    whose sizes are multiples of four; and only while a step is recorded by :class:`~deltasam.capture.Captured`.

    Args:
        weights: w, one tensor per parameter.
        direction: d, likewise.
        step: A scalar.
    """
    made: list[Tensor | None] = [None] * len(weights)
    tables = Tables._current
    if tables is None or step.dtype is not torch.float32 or not _is_aligned(step):
        return made
    pairs = zip(weights, direction, strict=True)
    fits = [k for k, (w, d) in enumerate(pairs) if _fits(w, d, step.device)]
    for start in range(0, len(fits), _MOST):
        some = fits[start : start + _MOST]
        outs = [torch.empty_like(weights[k]) for k in some]
        launch = _planned(tables, [weights[k] for k in some], [direction[k] for k in some], outs, step)
        if launch is not None:
            launch()
            for k, out in zip(some, outs, strict=True):
                made[k] = out
    return made


def _fits(w: Tensor, d: Tensor, device: torch.device) -> bool:
    alike = all(type(t) is Tensor and t.dtype is torch.float32 and t.device == device for t in (w, d))
    if not alike or d.is_sparse or not w.numel() or w.numel() % 4:
        return False
    return is_dense(w) and d.stride() == w.stride() and _is_aligned(w) and _is_aligned(d)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _planned(
    tables: Tables, weights: Sequence[Tensor], direction: Sequence[Tensor], outs: Sequence[Tensor], step: Tensor
) -> Callable[[], None] | None:
    """The launch of the kernel over tensors that it takes; None if the tables have no room for them."""
    blocks = [-(-w.numel() // _BLOCK) for w in weights]
    ends = list(accumulate(blocks))
    begins = [end - own for end, own in zip(ends, blocks, strict=True)]
    addresses = [[t.data_ptr() for t in tensors] for tensors in (weights, direction, outs)]
    table = tables.take([ends, begins, [w.numel() for w in weights], *addresses])
    if table is None:
        return None
    kernel = import_module("deltasam.fused._kernel").move_kernel

    def launch() -> None:
        with torch.cuda.device(step.device) if step.is_cuda else nullcontext():  # Triton's is the current one
            kernel[(ends[-1],)](table, step, len(weights), MOST=_MOST, BLOCK=_BLOCK, num_warps=8)

    return launch


@cache
def is_ready(device: torch.device) -> bool:
    """Whether the kernel runs on this device: it is compiled, which a recording would not survive, and tried out."""
    if device.type != "cuda":
        return False
    try:
        return works(device)
    except Exception as why:  # noqa: BLE001 - no Triton, no compiler, a device it does not know: torch's kernels remain
        _log.info("the fused kernel for perturbations cannot be used on %s: %s", device, why)
        return False


def works(device: torch.device) -> bool:
    """Tries the kernel out against torch: several tensors, a block that is not full, a step of zero."""
    generator = torch.Generator().manual_seed(0)
    sizes = (8, _BLOCK, 2 * _BLOCK + 12)
    weights, direction = (
        [torch.randn(n, generator=generator, device="cpu").to(device) for n in sizes] for _ in range(2)
    )
    direction[1][5] = float("inf")
    for size in (0.5, 0.0):
        tables, outs = Tables(device), [torch.empty_like(w) for w in weights]
        launch = _planned(tables, weights, direction, outs, torch.tensor(size, device=device))
        assert launch is not None
        tables.send()
        launch()
        wanted = [w if size == 0 else w + size * d for w, d in zip(weights, direction, strict=True)]
        if not all(torch.allclose(a, b) for a, b in zip(outs, wanted, strict=True)):
            return False
    return True
