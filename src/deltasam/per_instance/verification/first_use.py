"""The checks after a first comparison at w: the graph of the model without proxies, and the perturbed pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from deltasam.per_instance.errors import MisreadError, UncoveredError
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import CheckResult, Scale, describe
from deltasam.per_instance.verification.moved_weights import MOST_COMPARISONS, is_followed
from deltasam.per_instance.verification.plain_pass import Run, plain_losses, reached_from
from deltasam.step.gradients import refuse_reentrant


def passes_compare(slots: ParameterSlots, run: Run, check: CheckResult) -> bool:
    """Makes sure that a parameter without a gradient has none in the model without proxies, either.

    A ``torch.autograd.Function`` takes a proxy for a constant, unnoticed.

    Returns:
        False for a model that uses different parameters in every pass, so that passes cannot be compared.

    Raises:
        UncoveredError: A parameter has a gradient that the engine does not see.
    """
    has_gradient = {name: g is not None for name, g in zip(slots.params, check.gradients, strict=True)}
    if all(has_gradient.values()) or slots.is_sharded:
        return True
    losses = plain_losses(slots.model, run)
    refuse_reentrant(losses)
    reached = reached_from(losses)
    missed = [name for name, p in slots.params.items() if id(p) in reached and not has_gradient[name]]
    same = all(id(p) in reached for name, p in slots.params.items() if has_gradient[name])
    if missed and same:
        raise UncoveredError(describe(slots.model, missed, "a torch.autograd.Function"), missed)
    return same


def check_perturbed_pass(
    slots: ParameterSlots,
    run: Run,
    losses: Tensor,
    norms: Tensor,
    check: CheckResult,
    scale: Scale | None,
    perturb: Callable[[Tensor], AbstractContextManager[None]],
) -> None:
    """Compares the perturbed pass with moved weights, where the gradient at w is right.

    Raises:
        MisreadError: An input whose layout the gradient did not prove was misread; carries the correction.
        UncoveredError: The perturbed pass does not follow the weights.
    """
    if check.group < 0 or slots.is_sharded or len(slots.memory.verified) >= MOST_COMPARISONS:
        return
    factor = 1.0 if scale is None else float(scale(torch.ones((), device=losses.device)))
    with torch.enable_grad():
        if is_followed(slots.model, run, losses, norms, slots.params, check, factor, perturb):
            return
    if check.unproven:
        raise MisreadError(
            "a layer without a gradient is called with an input that is not laid out like the batch",
            shared=check.unproven,
        )
    raise UncoveredError(
        "the losses of the low-rank engine at perturbed weights differ from those at moved weights: the model reads a "
        "parameter in a way that bypasses the engine, or a rule that you registered (register_rule) is wrong",
        list(slots.params),
    )
