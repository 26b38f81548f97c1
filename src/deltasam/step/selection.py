"""Which parameters a method perturbs. They need not be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

from torch import Tensor, nn

from deltasam.step.adapters import adapted_layers, adapter_parameters, base_matrices, refuse_dora
from deltasam.step.quantized import quantized_weights

Preset = Literal["trained", "all", "base", "adapters", "no-embeddings", "no-bias-norm", "norms", "lora"]
Selection = Preset | Callable[[str, nn.Parameter], bool]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a tied parameter is listed once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def select(
    model: nn.Module, which: Selection = "trained", among: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """The parameters that a method perturbs.

    Args:
        model: The model. Some parameter must be trained, perturbed or not.
        which: ``"trained"``: what requires gradients; ``"base"``: the matrices that carry adapters, frozen or not,
            also quantized ones; ``"adapters"`` (or ``"lora"``): the adapters, and prompts that PEFT trains; ``"all"``:
            every parameter, trained or frozen. Of what is trained: ``"no-embeddings"``: all except the tables of
            ``nn.Embedding`` (and heads tied to them); ``"no-bias-norm"``: neither biases nor the parameters of
            normalisation layers; ``"norms"``: only those of normalisation layers. Or a predicate
            ``(name, parameter) -> bool``, which is asked for every parameter, trained or frozen.
        among: The trained parameters, if the caller has them already.

    Returns:
        The chosen parameters by name. A quantized weight is represented by a parameter without memory.

    Raises:
        ValueError: Nothing is trained, nothing was chosen, the preset is unknown, or DoRA reads a chosen quantized
            weight.

    Example:
        >>> list(select(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "norms"))
        ['1.weight', '1.bias']
    """
    trained = trainable(model) if among is None else among
    if not trained:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: set requires_grad=True on some")
    if which == "trained":
        return trained
    if which == "base":
        chosen = base_matrices(model)
        refuse_dora(model, chosen)
        return chosen
    every = _every(model) if which == "all" or callable(which) else trained
    wanted = _predicate(model, which)
    chosen = {name: p for name, p in every.items() if wanted(name, p)}
    if not chosen:
        kind = "parameters" if callable(which) else "trained parameters"
        raise ValueError(f"params={which!r} chose none of the {len(every)} {kind}, e.g. {next(iter(every))!r}")
    refuse_dora(model, chosen)
    return chosen


def differentiable(params: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, frozen parameters among these require gradients, so that autograd can differentiate by them.

    Differentiate with ``torch.autograd.grad``: ``backward`` would leave them with a ``.grad``.
    """
    frozen = [p for p in params.values() if not p.requires_grad and p.is_leaf and p.device.type != "meta"]
    return _unfrozen(frozen) if frozen else nullcontext()


@contextmanager
def _unfrozen(frozen: Sequence[Tensor]) -> Iterator[None]:
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _every(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters of floating point, and stand-ins for quantized weights."""
    quantized = quantized_weights(model)
    packed = {name.removesuffix(".weight") for name in quantized}
    ordinary = {
        name: p
        for name, p in model.named_parameters()
        if p.is_floating_point() and not (name.rpartition(".")[0] in packed and name.endswith(".weight"))
    }
    return {**ordinary, **quantized}


KINDS = ("embeddings", "norms", "biases", "adapters", "base")


def kinds_of(model: nn.Module) -> dict[str, set[int]]:
    """The parameters (``id``) of each of :data:`KINDS`; a parameter may be of several kinds, or of none."""
    modules = list(model.modules())
    own = [(module, p) for module in modules for p in module.parameters(recurse=False)]
    return {
        "embeddings": {id(p) for module, p in own if isinstance(module, nn.Embedding)},
        "norms": {id(p) for module, p in own if "norm" in type(module).__name__.lower()},
        "biases": {id(p) for name, p in model.named_parameters() if _is_bias(name)},
        "adapters": adapter_parameters(model),
        "base": {id(p) for p in base_matrices(model).values()} if adapted_layers(model) else set(),
    }


def _predicate(model: nn.Module, which: Selection) -> Callable[[str, nn.Parameter], bool]:
    if callable(which):
        return which
    if which == "all":
        return lambda name, p: True
    if which in ("adapters", "lora"):
        adapters = adapter_parameters(model)
        return lambda name, p: id(p) in adapters
    if which in ("no-embeddings", "no-bias-norm", "norms"):
        kinds = kinds_of(model)
        if which == "norms":
            return lambda name, p: id(p) in kinds["norms"]
        without = kinds["embeddings"] if which == "no-embeddings" else kinds["norms"] | kinds["biases"]
        return lambda name, p: id(p) not in without
    raise ValueError(f"params={which!r} must be one of {get_args(Preset)} or a predicate (name, parameter) -> bool")


def _is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("bias") or last.startswith("bias_")  # bias_ih_l0 of a recurrent layer, bias_k of attention
