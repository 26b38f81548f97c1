"""Arguments that a method does not take, such as the parameters of a model, are answered with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from deltasam.methods._other_words import no_such_hyperparameter

Function = TypeVar("Function", bound=Callable[..., Any])


class KeywordsOnly:
    """A ``__new__`` that says how a method is made, where Python would count, or name, what it does not take.

    ``dataclass`` writes the ``__init__`` of every class, so that nothing can be said there. No function on purpose:
    autodoc would then show this signature, for every method, and not that of its hyperparameters.
    """

    def __call__(self, kind: type, /, *args: Any, **kwargs: Any) -> Any:
        """An object that ``__init__`` is to fill."""
        if args and not _takes_positions(kind):
            raise TypeError(_words(kind))
        if kwargs and not inspect.isabstract(kind):
            check_keywords(kind, kwargs)
        return object.__new__(kind)


def check_keywords(kind: type, given: dict[str, Any]) -> None:
    """Raises a TypeError for the first keyword that the class does not have."""
    known = _keywords(kind.__init__)  # type: ignore[misc]
    unknown = None if known is None else next((name for name in given if name not in known), None)
    if unknown is not None:
        raise TypeError(no_such_hyperparameter(kind, unknown, given[unknown], known or ()))


@lru_cache(maxsize=256)
def _keywords(init: Callable[..., None]) -> tuple[str, ...] | None:
    """The keywords that an ``__init__`` takes; None if it takes any."""
    _, *rest = inspect.signature(init).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in rest):
        return None
    return tuple(p.name for p in rest if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def explain_missing_arguments(backward: Function) -> Function:
    """Lets ``method.backward(loss)`` say what to write, where Python would list arguments. The signature stays."""
    names = ("model", "batch", "objective")

    @wraps(backward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < len(names) and not all(name in kwargs for name in names[len(args) :]):
            raise TypeError(_lacking(self, names[len(args) :], args, kwargs))
        return backward(self, *args, **kwargs)

    return cast("Function", checked)


def _lacking(method: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    *first, last = [name for name in names if name not in kwargs]
    lacks = f"{', '.join(first)} and {last}" if first else last
    unknown = ", ".join(name for name in kwargs if name not in (*names, "scale"))
    place = "in the place of loss.backward() " if len(args) == 1 and isinstance(args[0], Tensor) else ""
    return (
        f"{type(method).__name__}.backward lacks {lacks}{f', and does not know {unknown}' if unknown else ''}: {place}"
        "write method.backward(model, batch, objective), which computes the losses itself, where objective(model, "
        "batch) returns that of every instance, shape (N,): deltasam.Classification() for Hugging Face models, or "
        "lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction='none'), for example"
    )


def _takes_positions(kind: type) -> bool:
    """Whether a class of the user's own has arguments without keywords."""
    _, *rest = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in rest)


def _words(kind: type) -> str:
    made = f"{kind.__name__}({'rho=0.05' if 'rho' in getattr(kind, '__dataclass_fields__', ()) else ''})"
    return (
        f"{kind.__name__} takes hyperparameters, by keyword, and no parameters of a model: make method = {made} and "
        "call method.backward(model, batch, objective) in the place of loss.backward(), or, in a loop with closures, "
        "optimizer = deltasam.integrations.MethodOptimizer(optimizer, method, model)"
    )
