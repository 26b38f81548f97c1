"""Numbers that a model puts on the device while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def filled_constants() -> Iterator[None]:
    """Inside, ``torch.tensor(0.0, device="cuda")`` fills memory of the device instead of copying from the host.

    A CUDA graph cannot record a copy from memory that is not pinned. Models of transformers with eager attention make
    such numbers for their masks.
    """
    own = torch.tensor

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if on_gpu and not args and isinstance(data, (bool, int, float)) and not options.get("pin_memory"):
            return torch.full((), data, **{key: value for key, value in options.items() if key != "pin_memory"})
        return own(data, *args, **options)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = own
