"""Peak memory of a piece of work: CUDA's own counter, or on the CPU the live storages of all tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during the work, beyond those alive before it.

    On the CPU, buffers that live and die inside one kernel are not seen; parameter-sized copies always are.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    live = LiveStorages()
    with live:
        work()
    return live.peak


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
