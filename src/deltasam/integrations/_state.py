"""The state of methods and objectives on disk: JSON for numbers, safetensors for tensors, no pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasam.integrations.storage import StorageError, write_bytes, write_text
from deltasam.parallel.shards import local

_TENSOR = "$tensor"
_SPARSE = "$sparse"
_CHECKSUM = "$sha256"


def save_state(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Writes nested dictionaries of numbers, strings and tensors to ``name.json`` and ``name.safetensors``.

    Raises a TypeError for any other type, which would need pickle.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    numbers = _split(state, (), tensors)
    folder.mkdir(parents=True, exist_ok=True)
    content = save(tensors)
    numbers = {_CHECKSUM: hashlib.sha256(content).hexdigest(), **numbers}
    write_bytes(folder / f"{name}.safetensors", content)
    write_text(folder / f"{name}.json", json.dumps(numbers, indent=1))


def load_state(folder: Path, name: str, device: torch.device) -> dict[str, Any] | None:
    """Reads what :func:`save_state` wrote, with tensors on ``device``; returns None if there is no such file."""
    from safetensors.torch import load

    numbers, tensors = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not numbers.is_file():
        return None
    try:
        saved = json.loads(numbers.read_text(encoding="utf-8"))
        content = tensors.read_bytes()
        if hashlib.sha256(content).hexdigest() != saved.pop(_CHECKSUM):
            raise ValueError("the checksum of the tensors has changed")
        on_device = {key: tensor.to(device) for key, tensor in load(content).items()}
        found: dict[str, Any] = _joined(saved, on_device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(
            f"{numbers}: the state of the method is truncated or altered ({error}); resume from an earlier checkpoint"
        ) from error
    return found


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Moves every tensor to ``tensors`` and returns the value with their names instead."""
    if isinstance(value, Tensor) and value.is_sparse:
        rows = value.coalesce()
        return {_SPARSE: _split([rows.indices(), rows.values(), list(rows.shape)], path, tensors)}
    if isinstance(value, Tensor):
        name = "/".join(path)
        # The local part of a shard: every process has its own file. Cloned, because safetensors refuses tensors that
        # share memory.
        tensors[name] = local(value).detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _split(part, (*path, key), tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(part, (*path, str(i)), tensors) for i, part in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"the state has {type(value).__name__} at {'/'.join(path)!r}; a checkpoint stores numbers, strings, tensors, "
        "and lists and dictionaries (with string keys) of them"
    )


def _joined(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if set(value) == {_SPARSE}:
            return torch.sparse_coo_tensor(*_joined(value[_SPARSE], tensors), check_invariants=True).coalesce()
        return {key: _joined(part, tensors) for key, part in value.items()}
    if isinstance(value, list):
        return [_joined(part, tensors) for part in value]
    return value
