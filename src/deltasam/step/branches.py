"""Passes of a recorded step that do not wait for each other: parallel branches of its CUDA graph.

The probes of delta-SAM need nothing from the pass at w, nor it from them, until the weights are made of all their
losses. A small batch fills a part of the GPU only; as branches of the graph such passes share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BRANCHES = 2  # beside the main one; each stream has a workspace of cuBLAS (32 MiB), so the same ones serve every step
_sides: dict[torch.device, list[torch.cuda.Stream]] = {}


def is_recorded(device: torch.device) -> bool:
    """Whether what is launched on the device now is recorded as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Branches:
    """Work beside the main stream of a step, until :meth:`join`. Where nothing is recorded, all runs in its place.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[torch.cuda.Stream] = []
        self._kept: list[Tensor] = []

    @contextmanager
    def concurrent(self, reads: Iterable[Tensor]) -> Iterator[None]:
        """What is launched inside may run at the same time as what follows.

        Its results are valid after :meth:`join`. Autocast keeps no casts of the weights meanwhile: those of the main
        stream may not be there yet, and a pass without a graph needs each of them once.

        Args:
            reads: Tensors of the main stream that it reads; their memory is not given to others before the join.
        """
        if not is_recorded(self._device):
            yield
            return
        if self._device not in _sides:
            _sides[self._device] = [torch.cuda.Stream(self._device) for _ in range(_BRANCHES)]
        side = _sides[self._device][len(self._open) % _BRANCHES]
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
        """What follows waits for all that was launched aside."""
        for side in dict.fromkeys(self._open):
            torch.cuda.current_stream(self._device).wait_stream(side)
        self._open.clear()
        self._kept.clear()
