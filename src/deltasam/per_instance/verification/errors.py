"""Why a model has no exact low-rank perturbation, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltasam.step.checks import is_out_of_memory, uses_a_graph_twice

#: What a model, an objective or a rule fails with; an exception of the user's own kind is not the engine's fault.
COMMON = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


class InstancesMixedError(ValueError):
    """The loss of one instance depends on other instances, so "per instance" is not defined."""


class UncoveredError(NotImplementedError):
    """Parameters are used in a way that no rule of the low-rank engine covers; the loop engine covers every model."""

    def __init__(self, message: str, parameters: list[str]) -> None:
        super().__init__(message)
        self.parameters = parameters


class NoRuleError(RuntimeError):
    """An operation could not be carried out for every instance; carries what is needed to say so."""

    def __init__(self, operation: str, parameters: list[str]) -> None:
        super().__init__(operation)
        self.operation = operation
        self.parameters = parameters


class MisreadError(ValueError):
    """The pass has to be made again: where the instances are was not as assumed."""

    def __init__(self, message: str, learned_size: int | None = None, *, of_the_losses: bool = False) -> None:
        super().__init__(message)
        self.learned_size = learned_size
        self.of_the_losses = of_the_losses  # there are not as many as instances


class SizeUnknownError(ValueError):
    """How many instances there are cannot be seen: whoever calls the engine has to say."""


class ModelError(Exception):
    """Carries an error of the model or the objective, which came up without any proxies, past the engine's doubts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SuspectedMixError(ValueError):
    """The engine sees a loss depend on rows of other instances; or it has misread which rows those are."""

    def __init__(self, size: int, members: slice) -> None:
        super().__init__("the loss of one instance depends on the other instances of the batch")
        self.size = size
        self.members = members


class RuleError(RuntimeError):
    """A rule of the user's own fails; says which."""


_OWN = (InstancesMixedError, UncoveredError, NoRuleError, MisreadError, SizeUnknownError, SuspectedMixError, RuleError)


def of_a_rule(error: Exception, rule: Callable[..., Any], operation: Any) -> RuleError | None:
    """The error that names the rule; None for an error that is about the model, or comes up in the engine's rules."""
    if getattr(rule, "__module__", "").startswith("deltasam.") or isinstance(error, _OWN):
        return None
    if isinstance(error, RuntimeError) and (is_out_of_memory(error) or uses_a_graph_twice(error)):
        return None
    name = getattr(operation, "__name__", str(operation))
    which = f"the rule {getattr(rule, '__qualname__', rule)} for the operation {name}"
    if isinstance(error, RecursionError):
        return RuleError(
            f"{which} calls itself without end: inside a rule, call the operation with tensors, such as "
            "state.values(weight), not with the perturbed parameter itself"
        )
    first = str(error).splitlines()[0] if str(error) else ""
    return RuleError(f"{which} fails ({type(error).__name__}: {first})")
