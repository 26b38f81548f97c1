"""Peak memory of a piece of work: CUDA's own counter, or on the CPU the live storages of all tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import TorchDispatchMode, tree_leaves


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during the work, beyond those alive before it.

    What CUDA graphs that were recorded in the work keep for themselves counts in full, used or not: nothing else can
    have it. Between two replays the counter of the allocator takes it for free, so the work is to return a function
    that replays: it is called once more, and what the graphs keep is added to the peak of that call.

    On the CPU, buffers that live and die inside one kernel are not seen; parameter-sized copies always are.

    Args:
        work: The work. What it returns is kept alive until memory has been read.
        device: Where it runs.
    """
    if device.type == "cuda":
        return _peak_on_gpu(work, device)
    live = LiveStorages()
    with live:
        work()
    return live.peak


def release(device: torch.device) -> None:
    """Gives back what nobody holds any more, cycles included, so that the next measurement starts afresh."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def idle_in_graphs(segments: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that private pools (those of CUDA graphs) hold beyond what the allocator counts as allocated.

    Args:
        segments: As ``torch.cuda.memory_snapshot()`` lists them.
    """
    private = [each for each in segments if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in private)


def _peak_on_gpu(work: Callable[[], object], device: torch.device) -> int:
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, idle_before = torch.cuda.memory_allocated(device), _idle()
    again = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    idle = _idle() - idle_before
    if idle > 0 and callable(again):
        torch.cuda.reset_peak_memory_stats(device)
        again()
        torch.cuda.synchronize(device)
        peak = max(peak, torch.cuda.max_memory_allocated(device) - before + idle)
    return int(peak)


def _idle() -> int:
    return idle_in_graphs(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that an operation makes until it is freed.

    Attributes:
        current: Bytes alive now that were made inside the mode, less those that were there before and have gone.
        peak: The most that ``current`` has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        for leaf in tree_leaves((args, keywords)):
            self._meet(leaf, made_here=False)
        result = func(*args, **keywords)
        for leaf in tree_leaves(result):
            self._meet(leaf, made_here=True)
        return result

    def _meet(self, leaf: Any, *, made_here: bool) -> None:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return
        storage = leaf.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        # What was alive before the work and dies in it (an old gradient) makes room: it counts down, never up.
        weakref.finalize(storage, self._gone, size).atexit = False
        if made_here:
            self.current += size
            self.peak = max(self.peak, self.current)

    def _gone(self, size: int) -> None:
        self.current -= size
