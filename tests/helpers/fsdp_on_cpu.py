"""Accelerate's FSDP without a GPU.

Accelerate takes ``--use_fsdp`` (or the Trainer's ``fsdp``) seriously for accelerators only: ``AcceleratorState`` turns
MULTI_GPU and its like into FSDP, and leaves MULTI_CPU what it is, DistributedDataParallel. All the rest of it, and of
the Trainer, works on a CPU with gloo. :func:`allow` lets MULTI_CPU through, and that is all it does.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def allow() -> None:
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = init


def forget() -> None:
    """Lets the next Accelerator or Trainer of this process choose anew."""
    import os

    AcceleratorState._reset_state(reset_partial_state=False)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
