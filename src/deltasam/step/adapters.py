"""Adapters (LoRA and its relatives) as PEFT inserts them, and the layers under them; PEFT is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from deltasam._torch import children_of
from deltasam.step.quantized import is_quantized, stand_in


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that carry adapters, by name: modules with a ``base_layer`` and the names of their adapters.

    Example:
        >>> adapted_layers(nn.Sequential(nn.Linear(2, 2)))
        {}
    """
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with adapters. A part that PEFT trains as a whole (modules_to_save) is not."""
    return children_of(module).get("base_layer") is not None and hasattr(module, "adapter_layer_names")


def adapter_parameters(model: nn.Module) -> set[int]:
    """The ``id`` of every parameter that belongs to an adapter, or to the prompts that PEFT trains."""
    found = {id(p) for name, p in model.named_parameters() if "lora_" in name}
    for module in model.modules():
        prompts = children_of(module).get("prompt_encoder") if hasattr(module, "peft_config") else None
        found.update(id(p) for p in (prompts.parameters() if isinstance(prompts, nn.ModuleDict) else ()))
    for layer in adapted_layers(model).values():
        for name in layer.adapter_layer_names:  # type: ignore[union-attr]
            part = getattr(layer, str(name), None)
            if isinstance(part, nn.Module):
                found.update(id(p) for p in part.parameters())
    return found


def base_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices that carry adapters, by name, frozen or not; a tied one is listed once, under its first name.

    A quantized one is represented by a stand-in.

    Raises:
        ValueError: No matrix carries an adapter, or adapters are merged into the matrices.
    """
    refuse_attention(model)
    layers = adapted_layers(model)
    for name, layer in layers.items():
        if getattr(layer, "merged", False):
            raise ValueError(
                f"params='base': the adapter of {name!r} is merged into its matrix, so it takes no part in the "
                "forward pass: call model.unmerge_adapter() before training"
            )
    found = [pair for prefix, layer in layers.items() for pair in _base(prefix, layer)]
    if not found:
        has = "adapters of vectors only" if layers else "no adapters"
        raise ValueError(
            f"params='base' selects the matrices that carry adapters, and {type(model).__name__} has {has}: adapt "
            "matrices with peft.get_peft_model(model, LoraConfig(...)), or select the matrices to perturb by a "
            "predicate (name, parameter) -> bool"
        )
    first = {id(p): name for name, p in reversed(found)}
    return {name: p for name, p in found if first[id(p)] == name}


def innermost(layer: nn.Module) -> nn.Module:
    """The layer under all adapters, which may be around one another."""
    while is_adapted(layer):
        layer = layer.base_layer  # type: ignore[assignment]
    return layer


def refuse_attention(model: nn.Module) -> None:
    """Raises a ValueError if PEFT's LoRA of a ``MultiheadAttention`` makes new matrices in every forward pass."""
    for name, layer in adapted_layers(model).items():
        if isinstance(layer.base_layer, nn.MultiheadAttention):
            raise ValueError(
                f"PEFT puts new matrices into {name!r}, a MultiheadAttention, in every forward pass, so it cannot be "
                "perturbed: adapt other layers (target_modules=...), or choose SAM or ERM with params='trained'"
            )


def refuse_dora(model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if DoRA reads a chosen quantized weight besides calling its layer.

    It dequantizes the weight for its norm, and with dropout for a second product. A perturbation of the output of the
    layer reaches neither.
    """
    if not any(p.is_meta for p in chosen.values()):
        return
    stand_ins = {id(p) for p in chosen.values()}
    for name, layer in adapted_layers(model).items():
        base: Any = layer.base_layer
        if len(getattr(layer, "lora_magnitude_vector", ())) and is_quantized(base) and id(stand_in(base)) in stand_ins:
            raise ValueError(
                f"params selects the weight of {name!r}, which is quantized ({type(base).__name__}) and has a DoRA "
                "adapter. DoRA reads that weight outside of its layer, where it cannot be perturbed: use LoRA "
                "(use_dora=False), load the base in bfloat16, or choose params='trained' or 'adapters'"
            )


def _base(prefix: str, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    base, prefix = layer.base_layer, f"{prefix}.base_layer".lstrip(".")
    only = getattr(layer, "parameter_name", None)  # PEFT's target_parameters: one parameter of a module of several
    while is_adapted(base):  # type: ignore[arg-type]  # several adapters around one another
        base, prefix = base.base_layer, f"{prefix}.base_layer"  # type: ignore[union-attr]
    assert isinstance(base, nn.Module)
    if is_quantized(base):
        yield f"{prefix}.weight", stand_in(base)
        return
    for name, p in base.named_parameters():
        if p.ndim > 1 and p.is_floating_point() and only in (None, name):
            yield f"{prefix}.{name}", p
