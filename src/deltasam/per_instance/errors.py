"""The errors of the engine: why a model has no exact low-rank perturbation, or no per-instance perturbation at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deltasam.step.checks import is_out_of_memory, uses_a_graph_twice

#: Errors that a model, an objective or a rule commonly raises; exceptions of other types are never caught.
COMMON = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


class InstancesMixedError(ValueError):
    """The loss of one instance depends on other instances, so a perturbation per instance is not defined."""


class UncoveredError(NotImplementedError):
    """The low-rank engine does not cover how some parameters are used; the loop engine covers every model.

    Attributes:
        parameters: The names of these parameters.
    """

    def __init__(self, message: str, parameters: list[str]) -> None:
        super().__init__(message)
        self.parameters = parameters


class NoRuleError(RuntimeError):
    """An operation without a rule, called with these parameters, cannot be vectorised over the instances."""

    def __init__(self, operation: str, parameters: list[str]) -> None:
        super().__init__(operation)
        self.operation = operation
        self.parameters = parameters


class MisreadError(ValueError):
    """The layout of an input was misread; carries the correction under which the pass is repeated.

    The correction is the right N (``size``), the places whose input is shared, or that the batch is tiled.
    """

    def __init__(
        self, message: str, *, size: int | None = None, shared: Iterable[Any] = (), tiled: bool = False
    ) -> None:
        super().__init__(message)
        self.size = size
        self.shared = frozenset(shared)
        self.tiled = tiled


class SizeUnknownError(ValueError):
    """The number of instances is not visible to the engine; the caller has to pass it."""


class ModelError(Exception):
    """Wraps an error that the model or the objective raises without any proxies."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SuspectedMixError(ValueError):
    """The loss of ``members`` depends on rows of other instances: they mix, or the rows were misread."""

    def __init__(self, size: int, members: slice) -> None:
        super().__init__("the loss of one instance depends on the other instances of the batch")
        self.size = size
        self.members = members


class RuleError(RuntimeError):
    """A rule that the user registered fails."""


_OWN = (InstancesMixedError, UncoveredError, NoRuleError, MisreadError, SizeUnknownError, SuspectedMixError, RuleError)


def explain_rule_error(error: Exception, rule: Callable[..., Any], operation: Any) -> RuleError | None:
    """An error that names the user's rule; None if the rule is the engine's or the error is not the rule's fault."""
    is_ours = getattr(rule, "__module__", "").startswith("deltasam.")
    if is_ours or isinstance(error, _OWN) or is_for_the_caller(error):
        return None
    name = getattr(operation, "__name__", str(operation))
    which = f"the rule {getattr(rule, '__qualname__', rule)} for the operation {name}"
    if isinstance(error, RecursionError):
        return RuleError(f"{which} calls itself: inside a rule, call the operation with state.values(weight)")
    return RuleError(f"{which} fails ({type(error).__name__}: {first_line(error)})")


def is_for_the_caller(error: Exception) -> bool:
    """Whether the loop would fail, too: out of memory, or a graph that is used twice."""
    return isinstance(error, RuntimeError) and (is_out_of_memory(error) or uses_a_graph_twice(error))


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]
