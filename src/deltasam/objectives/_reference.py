"""The reference of preference optimization: the same model without its adapters, or another model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from deltasam.objectives.batch import unwrapped

Reference = nn.Module | str | None
"""Another model, the name of a frozen adapter of the model, or None: the model with its adapters disabled."""


@contextmanager
def reference_of(model: nn.Module, reference: Reference) -> Iterator[nn.Module]:
    """The reference model, in eval mode. Modes, active adapters and ``requires_grad`` are restored afterwards.

    Raises:
        ValueError: There is no other model, and the model has no adapters that could be disabled.
    """
    chosen, adapters = _chosen(model, reference)
    # PEFT sets requires_grad of all adapters when it disables and enables them, also of those that the user froze.
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [module for module in chosen.modules() if module.training]
    try:
        with adapters:
            for module in modes:
                module.training = False
            yield chosen
    finally:
        for module in modes:
            module.training = True
        for p, flag in flags:
            if p.requires_grad != flag:
                p.requires_grad_(flag)


def _chosen(model: nn.Module, reference: Reference) -> tuple[nn.Module, AbstractContextManager[Any]]:
    if isinstance(reference, nn.Module):
        return reference, nullcontext()
    inner: Any = unwrapped(model)
    if isinstance(reference, str):
        known = list(getattr(inner, "peft_config", {}))
        if reference not in known:
            raise ValueError(
                f"DPO(reference={reference!r}) names an adapter of the model, which has {known}: load it with "
                f"model.load_adapter(..., adapter_name={reference!r}), or pass a reference model"
            )
        return model, _other_adapter(inner, reference)
    if hasattr(inner, "disable_adapter"):  # a PeftModel
        return model, inner.disable_adapter()
    if hasattr(inner, "disable_adapters") and getattr(inner, "peft_config", None):  # transformers' model.add_adapter
        return model, _disabled(inner)
    raise ValueError(
        f"DPO needs reference log-probabilities, but {type(inner).__name__} has no adapters to disable: pass a frozen "
        "copy of the model, DPO(reference=...), or add the columns 'ref_chosen_logps' and 'ref_rejected_logps' to the "
        "batch"
    )


@contextmanager
def _other_adapter(model: Any, name: str) -> Iterator[None]:
    if callable(model.active_adapters):  # adapters that transformers added; a property of PEFT's models
        before, several = model.active_adapters(), []
    else:
        before, several = model.active_adapter, list(model.active_adapters)
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)
        if len(several) > 1:  # a PeftModel itself remembers one
            model.base_model.set_adapter(several)


@contextmanager
def _disabled(model: Any) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
