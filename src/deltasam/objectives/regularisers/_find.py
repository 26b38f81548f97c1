"""Which layer embeds the input, in plain, wrapped and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Side = Literal["encoder", "decoder"]
Embeddings = str | nn.Module | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class Found:
    """The layers to hook, the modules around them, and the half of an encoder-decoder model they are in, or None."""

    layers: tuple[nn.Module, ...]
    ancestors: tuple[nn.Module, ...]
    region: nn.Module | None


def find_embeddings(model: nn.Module, embeddings: Embeddings, side: Side) -> Found:
    """Finds the embedding layer.

    Without ``embeddings``: the outermost module whose class has ``get_input_embeddings`` is asked, which sees through
    DDP, PEFT, ``torch.compile``, sentence-transformers and hand-written heads. Its answer is not always the module
    that is called (BART and T5 answer with ``shared``, and call copies of it tied to the same table), so every
    embedding layer on that table counts, within the chosen side of an encoder-decoder model.

    Raises:
        ValueError: Nothing was found.
    """
    if side not in ("encoder", "decoder"):
        raise ValueError(f"side={side!r} is not 'encoder' or 'decoder'")
    if embeddings is not None:
        layers = _named(model, embeddings)
        return Found(layers, _ancestors(model, layers), None)
    owner = next((m for m in model.modules() if callable(getattr(type(m), "get_input_embeddings", None))), None)
    if owner is None:
        raise ValueError(
            f"{type(model).__name__} has no get_input_embeddings(); say which layer embeds the input: "
            "embeddings=module, its name, or a predicate (name, module) -> bool"
        )
    region = _region(owner, side)
    root = owner if region is None else region
    layer: Any = owner.get_input_embeddings()  # type: ignore[operator]
    table = getattr(layer, "weight", None)
    same = [m for m in root.modules() if m is layer or (isinstance(m, nn.Embedding) and m.weight is table)]
    layers = tuple(m for m in same if not any(m is not outer and m in set(outer.modules()) for outer in same))
    if not layers:
        raise ValueError(
            f"found no embedding layer in the {side} of {type(owner).__name__}; name it with embeddings=..."
        )
    return Found(layers, _ancestors(model, layers), region)


def _named(model: nn.Module, embeddings: str | nn.Module | Callable[[str, nn.Module], bool]) -> tuple[nn.Module, ...]:
    if isinstance(embeddings, nn.Module):
        layers: tuple[nn.Module, ...] = tuple(m for m in model.modules() if m is embeddings)
    elif isinstance(embeddings, str):
        layers = tuple(m for name, m in model.named_modules() if name == embeddings or name.endswith("." + embeddings))
    else:
        layers = tuple(m for name, m in model.named_modules() if embeddings(name, m))
    if not layers:
        raise ValueError(
            f"embeddings={embeddings!r} is no module of {type(model).__name__}; see model.named_modules()"
        )
    return layers


def _region(owner: nn.Module, side: Side) -> nn.Module | None:
    if not getattr(getattr(owner, "config", None), "is_encoder_decoder", False):
        return None
    half = owner.get_encoder() if side == "encoder" else owner.get_decoder()  # type: ignore[operator]
    return half if isinstance(half, nn.Module) else None


def _ancestors(model: nn.Module, layers: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    inside = set(layers)
    return tuple(m for m in model.modules() if m not in inside and not inside.isdisjoint(m.modules()))
