"""Finds the layer that embeds the input, in plain, wrapped and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from deltasam._torch import any_compiled
from deltasam.objectives._checks import check_choice

Side = Literal["encoder", "decoder"]
Embeddings = str | nn.Module | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class Found:
    """The layers to hook, the modules around them, and the half of an encoder-decoder model they are in, or None."""

    layers: tuple[nn.Module, ...]
    ancestors: tuple[nn.Module, ...]
    region: nn.Module | None
    compiled: bool


def find_embeddings(model: nn.Module, embeddings: Embeddings, side: Side) -> Found:
    """Finds the embedding layer, in one walk over the modules because it is called in every pass.

    Without ``embeddings`` it calls ``get_input_embeddings`` of the outermost module whose class has it, which works
    through DDP, PEFT, ``torch.compile``, sentence-transformers and hand-written heads. The result is not always the
    module that the model calls (BART and T5 return ``shared``, and call copies that are tied to the same table), so
    every embedding layer with that table counts, within the chosen side of an encoder-decoder model.
    """
    check_choice("perturbed_embeddings", "side", side, Side)
    modules = dict(model.named_modules(remove_duplicate=False))
    compiled = any_compiled(modules.values())
    if embeddings is not None:
        names, region = _chosen(modules, embeddings), None
        if not names:
            raise ValueError(
                f"embeddings={embeddings!r} is not a module of {type(model).__name__}; see named_modules()"
            )
    else:
        owner = next((m for m in modules.values() if callable(getattr(type(m), "get_input_embeddings", None))), None)
        if owner is None:
            raise ValueError(
                f"{type(model).__name__} has no get_input_embeddings(): pass the layer that embeds the input, "
                "embeddings=module, its name, or a predicate (name, module) -> bool"
            )
        region = _region(owner, side)
        names = _on_the_table(modules, owner, region or owner)
        if not names:
            raise ValueError(f"no embedding layer in the {side} of {type(owner).__name__}; name it: embeddings=...")
    around = dict.fromkeys(prefix for name in names for prefix in _prefixes(name))
    return Found(
        layers=tuple(dict.fromkeys(modules[name] for name in names)),
        ancestors=tuple(dict.fromkeys(modules[prefix] for prefix in around)),
        region=region,
        compiled=compiled,
    )


def _on_the_table(modules: dict[str, nn.Module], owner: nn.Module, root: nn.Module) -> list[str]:
    """Names of the outermost modules inside ``root`` that look up the owner's word embeddings."""
    layer: Any = owner.get_input_embeddings()  # type: ignore[operator]
    table = getattr(layer, "weight", None)
    inside = [name + "." if name else "" for name, m in modules.items() if m is root]
    same = [
        name
        for name, m in modules.items()
        if (m is layer or (isinstance(m, nn.Embedding) and m.weight is table))
        and (m is root or any(name.startswith(prefix) for prefix in inside))
    ]
    return [name for name in same if not set(same).intersection(_prefixes(name))]  # an adapter contains the layer


def _chosen(
    modules: dict[str, nn.Module], embeddings: str | nn.Module | Callable[[str, nn.Module], bool]
) -> list[str]:
    if isinstance(embeddings, nn.Module):
        return [name for name, m in modules.items() if m is embeddings]
    if isinstance(embeddings, str):
        return [name for name in modules if name == embeddings or name.endswith("." + embeddings)]
    return [name for name, m in modules.items() if embeddings(name, m)]


def _prefixes(name: str) -> list[str]:
    """The names of the modules that contain this one, the outermost (with the empty name) first."""
    if not name:
        return []
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def _region(owner: nn.Module, side: Side) -> nn.Module | None:
    if not getattr(getattr(owner, "config", None), "is_encoder_decoder", False):
        return None
    # In transformers 4.50 an encoder-decoder with a classification head has no get_encoder.
    getter = getattr(owner, f"get_{side}", None) or getattr(getattr(owner, "base_model", None), f"get_{side}", None)
    half = None if getter is None else getter()
    return half if isinstance(half, nn.Module) else None
