"""Which parameters a method may perturb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import nn

Preset = Literal["all", "no-embeddings", "no-bias-norm", "norms", "lora"]
Selection = Preset | Callable[[str, nn.Parameter], bool]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a tied parameter is listed once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def select(
    model: nn.Module, which: Selection = "all", among: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """The trainable parameters that a method may perturb.

    Args:
        model: The model.
        which: ``"all"``; ``"no-embeddings"``: all except the tables of ``nn.Embedding`` (and heads tied to them);
            ``"no-bias-norm"``: neither biases nor the parameters of normalisation layers; ``"norms"``: only those of
            normalisation layers; ``"lora"``: only adapters; or a predicate ``(name, parameter) -> bool``.
        among: The trainable parameters, if the caller has them already.

    Returns:
        The chosen parameters by name.

    Raises:
        ValueError: Nothing is trainable, nothing was chosen, or the preset is unknown.

    Example:
        >>> list(select(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "norms"))
        ['1.weight', '1.bias']
    """
    params = trainable(model) if among is None else among
    if not params:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: set requires_grad=True on some")
    if which == "all":
        return params
    wanted = _predicate(model, which)
    chosen = {name: p for name, p in params.items() if wanted(name, p)}
    if not chosen:
        example = next(iter(params))
        raise ValueError(f"params={which!r} chose none of the {len(params)} trainable parameters, e.g. {example!r}")
    return chosen


def _predicate(model: nn.Module, which: Selection) -> Callable[[str, nn.Parameter], bool]:
    if callable(which):
        return which
    if which == "lora":
        return lambda name, p: "lora_" in name
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    if which == "no-embeddings":
        return lambda name, p: id(p) not in tables
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    if which == "no-bias-norm":
        return lambda name, p: id(p) not in norms and not _is_bias(name)
    if which == "norms":
        return lambda name, p: id(p) in norms
    raise ValueError(f"params={which!r} must be one of {get_args(Preset)} or a predicate (name, parameter) -> bool")


def _is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("bias") or last.startswith("bias_")  # bias_ih_l0 of a recurrent layer, bias_k of attention
