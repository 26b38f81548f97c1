"""Keys of recorded steps: two steps share a graph if everything that a recording fixes is the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import children_of, parameters_of
from deltasam.methods import Method
from deltasam.objectives import Objective
from deltasam.step.float32 import rounded
from deltasam.step.precision import is_measured


class NotCapturableError(Exception):
    """A step cannot be recorded; the message is the reason."""


class Same:
    """Compares an object by identity. Keeps it alive, so that its address is not reused."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def objective_key(objective: Any) -> Hashable:
    """Objectives without state compare by their fields, so every step may make a new ``Classification()``."""
    stateless = isinstance(objective, Objective) and type(objective).state_dict is Objective.state_dict
    if stateless and type(objective).__hash__ not in (None, object.__hash__):
        return (type(objective), objective)
    return Same(objective)


def method_key(method: Method) -> Hashable:
    """Methods compare by their hyperparameters; one that cannot be hashed compares by identity.

    Where the radius is read from the device, its numbers are left out.
    """
    key: Hashable = method
    if method.reads_radius:
        others = [f.name for f in dataclasses.fields(method) if f.compare and f.name != "rho"]
        values = tuple((name, getattr(method, name)) for name in others)
        key = (type(method), values, method.is_erm() or method.step_radius().structure())
    try:
        hash(key)
    except TypeError:
        return Same(method)
    return key


def batch_key(batch: Any) -> Hashable:
    """Shapes, dtypes and devices of the tensors, and everything else by value.

    Raises:
        NotCapturableError: Something in the batch can be neither copied into a fixed place nor compared.
    """
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.dtype, batch.device)
    if isinstance(batch, Mapping):
        return tuple((key, batch_key(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, *(batch_key(value) for value in batch))
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch
    raise NotCapturableError(f"the batch holds a {type(batch).__name__}, which is neither a tensor nor a plain value")


def model_key(model: nn.Module) -> Hashable:
    """The modes of the modules, and the identity, address and trainability of every parameter."""
    modules = _modules(model)
    params = [p for module in modules for p in parameters_of(module).values() if p is not None]
    return (
        id(model),
        tuple([module.training for module in modules]),
        tuple([(id(p), p.data_ptr(), p.requires_grad) for p in params]),
    )


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules, in some order. Every step needs them, and ``model.modules()`` also composes names."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend([child for child in children_of(module).values() if child is not None])
    return list(found.values())


def surroundings_key(device: torch.device) -> Hashable:
    """The global settings that decide which kernels a step launches."""
    kind = device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        rounded(device),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        is_measured(),
    )
