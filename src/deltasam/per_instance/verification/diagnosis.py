"""What an error of a pass with proxies means: the instances mix, the model is not covered, or the model is broken."""

from __future__ import annotations

from deltasam.per_instance.errors import (
    InstancesMixedError,
    MisreadError,
    ModelError,
    NoRuleError,
    RuleError,
    SuspectedMixError,
    UncoveredError,
    first_line,
)
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import describe
from deltasam.per_instance.verification.mixing import mixes
from deltasam.per_instance.verification.plain_pass import Run, plain_losses


def diagnose(slots: ParameterSlots, run: Run, error: Exception, why: MisreadError | None) -> Exception:
    """The exception to raise, found by passes without proxies: if those fail, too, the error is the model's.

    A model that inspects its parameters, or that has its instances in another dimension than the first, can fail with
    any error; the loop covers it.

    Args:
        slots: Where the parameters are.
        run: Makes one pass.
        error: The error of the pass with proxies.
        why: Why the pass was repeated, if it was.
    """
    if isinstance(error, NoRuleError):
        message = describe(slots.model, error.parameters, f"an operation ({error.operation})")
        return UncoveredError(message, error.parameters)
    if isinstance(error, SuspectedMixError):
        # With sharded parameters a pass of one process alone would wait for the others.
        if slots.is_sharded or mixes(slots.model, run, error.size, error.members) is not False:
            return InstancesMixedError(
                "the loss of one instance depends on the other instances of the batch (in-batch negatives, statistics "
                "over the batch), so a perturbation per instance is not defined; use SAM or DeltaSAM for such "
                "objectives"
            )
        message = NOT_FOUND
    elif slots.is_sharded:
        return error
    else:
        try:
            plain_losses(slots.model, run)
        except ModelError as own:
            return own.error
        message = first_line(error)
        if not isinstance(error, RuleError):
            message = f"the low-rank engine fails on this model ({type(error).__name__}: {message})"
    return UncoveredError(message if why is None else f"{why}; {message}", list(slots.params))


NOT_FOUND = (
    "the low-rank engine could not find the instances: the first dimension of a layer's input must be the batch, with "
    "one row or k adjacent rows per instance"
)
