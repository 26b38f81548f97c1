"""Peak memory of a function: from CUDA's counter, or on the CPU from the live storages of all tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasam._torch import TorchDispatchMode, tree_leaves


@dataclass(frozen=True)
class Peak:
    """Peak memory of a function and of the steps after it.

    Attributes:
        whole: Bytes in excess of those before, from the first step on; the memory of CUDA graphs counts in full.
        steady: The same for one more step: without what only the first steps need, such as checks on first use.
        reserved: Bytes that the allocator held at most, with the weights and fragmentation; 0 on a CPU.
    """

    whole: int
    steady: int
    reserved: int = 0


def peak_of_steps(work: Callable[[], Callable[[], object]], device: torch.device) -> Peak:
    """Returns the peak memory of building and taking some steps, and of one more step.

    Args:
        work: Takes the first steps and returns the step, which is called once more.
        device: The device that it runs on.
    """
    if device.type != "cuda":
        live = LiveStorages()
        with live:
            again = work()
            whole, live.peak = live.peak, live.current
            again()
        return Peak(max(whole, live.peak), live.peak)
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, idle_before = torch.cuda.memory_allocated(device), _idle()
    again = work()
    torch.cuda.synchronize(device)
    first = torch.cuda.max_memory_allocated(device)
    idle = _idle() - idle_before
    torch.cuda.reset_peak_memory_stats(device)
    again()
    torch.cuda.synchronize(device)
    steady = torch.cuda.max_memory_allocated(device) + idle
    return Peak(max(first, steady) - before, steady - before, torch.cuda.max_memory_reserved(device))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns the peak number of bytes in tensors during a call, in excess of those before it.

    The memory of CUDA graphs that the call records counts in full, because nothing else can use it. Between replays,
    the allocator counts that memory as free. So ``work`` should return a function that replays: it is called once
    more, and the idle memory of the graphs is added to the peak of that call.

    On the CPU, temporary buffers inside a kernel are not seen; copies of parameters always are.

    Args:
        work: The function to measure. Its result is kept alive until the memory has been read.
        device: The device that it runs on.
    """
    if device.type == "cuda":
        return _peak_on_gpu(work, device)
    live = LiveStorages()
    with live:
        work()
    return live.peak


def release(device: torch.device) -> None:
    """Frees unused memory, including reference cycles, so that the next measurement starts clean."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def idle_in_graphs(segments: Sequence[Mapping[str, Any]]) -> int:
    """Returns the bytes in private pools (those of CUDA graphs) that the allocator does not count as allocated.

    Args:
        segments: The result of ``torch.cuda.memory_snapshot()``.
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
    """Tracks every storage that an operation creates until it is freed.

    Attributes:
        current: Bytes of live storages created inside the mode, minus those that existed before and were freed.
        peak: The maximum of ``current``.
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
            self._track(leaf, created=False)
        result = func(*args, **keywords)
        for leaf in tree_leaves(result):
            self._track(leaf, created=True)
        return result

    def _track(self, leaf: Any, *, created: bool) -> None:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return
        storage = leaf.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        # A storage from before that is freed (an old gradient) makes room: it is subtracted, but was never added.
        weakref.finalize(storage, self._freed, size).atexit = False
        if created:
            self.current += size
            self.peak = max(self.peak, self.current)

    def _freed(self, size: int) -> None:
        self.current -= size
