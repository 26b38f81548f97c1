"""Passes of a recorded step that run concurrently, as parallel branches of its CUDA graph.

The probes of delta-SAM and the pass at w do not depend on each other until the instance weights are computed from the
losses of both. A small batch does not fill the GPU; as branches of the graph such passes share it. What the probes
need (r, and the weights on both sides of w) has a stream of its own, so that the pass at w does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_BRANCHES = 2  # besides the main one; every stream has a cuBLAS workspace (32 MiB), so all steps use the same ones
_sides: dict[torch.device, list[torch.cuda.Stream]] = {}
_main: dict[torch.device, torch.cuda.Stream] = {}  # of the recording, while another stream prepares a pass


def is_recorded(device: torch.device) -> bool:
    """Whether kernels that are launched on the device now are recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def main_memory(device: torch.device) -> AbstractContextManager[Any]:
    """Memory that is allocated inside belongs to the main stream, also during :meth:`Branches.prepare`.

    Every stream has its own memory. That of the main stream is used again for the gradients and w + eps.
    """
    return torch.cuda.stream(_main[device]) if device in _main else nullcontext()


class Branches:
    """Side streams of a recorded step, until :meth:`join`. In a step that is not recorded, all work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[torch.cuda.Stream] = []
        self._ahead: list[torch.cuda.Stream] = []
        self._kept: list[Tensor] = []

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Kernels inside run before the concurrent passes that start inside, at the same time as the main stream's.

        Tensors of the main stream that they read or write must be kept, see :meth:`keep`; large ones that they need
        should be allocated in :func:`main_memory`.
        """
        if not is_recorded(self._device):
            yield
            return
        main, ahead = torch.cuda.current_stream(self._device), self._streams()[_BRANCHES]
        ahead.wait_stream(main)
        self._ahead.append(ahead)
        _main[self._device] = main
        try:
            with torch.cuda.stream(ahead):
                yield
        finally:
            del _main[self._device]

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these tensors is not reused before the join."""
        if is_recorded(self._device):
            self._kept.extend(tensors)

    def _streams(self) -> list[torch.cuda.Stream]:
        """The side streams, and one that prepares what they read."""
        if self._device not in _sides:
            streams = [torch.cuda.Stream(self._device) for _ in range(_BRANCHES + 1)]  # type: ignore[no-untyped-call]
            _sides[self._device] = streams
        return _sides[self._device]

    @contextmanager
    def concurrent(self, reads: Iterable[Tensor]) -> Iterator[None]:
        """Kernels that are launched inside may run at the same time as those that follow.

        Their results are valid after :meth:`join`. Inside, autocast does not cache casts of the weights: those of the
        main stream may not be finished, and a pass without a graph needs each of them once.

        Args:
            reads: Tensors of the main stream that the kernels read; their memory is not reused before the join.
        """
        if not is_recorded(self._device):
            yield
            return
        side = self._streams()[len(self._open) % _BRANCHES]
        side.wait_stream(torch.cuda.current_stream(self._device))
        self._open.append(side)
        self._kept.extend(reads)
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches)

    def join(self) -> None:
        """Makes the main stream wait for the side streams."""
        for side in dict.fromkeys((*self._ahead, *self._open)):
            torch.cuda.current_stream(self._device).wait_stream(side)
        self._open.clear()
        self._ahead.clear()
        self._kept.clear()
