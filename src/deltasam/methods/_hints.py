"""Errors for arguments that a method does not have: the nearest name, or a line of advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from deltasam.step.checks import shown
from deltasam.step.names import suggest

Function = TypeVar("Function", bound=Callable[..., Any])

_CALL = "method.backward(model, batch, objective)"
_WRAPPER = "deltasam.integrations.MethodOptimizer(optimizer, method, model)"
_ADVICE = {
    "adaptive": "use ASAM(rho=0.5)",
    **dict.fromkeys(("base_optimizer", "optimizer"), f"step your optimizer after {_CALL}, or use {_WRAPPER}"),
    **dict.fromkeys(("lr", "weight_decay", "momentum"), "pass it to the optimizer, for example torch.optim.AdamW"),
    **dict.fromkeys(("model", "batch", "objective", "loss_fn", "criterion"), f"pass it to {_CALL}"),
    "rho_scheduler": "use rho=Scheduled(...)",
    "samples": "pass it to the weighting: weighting=FiniteDifference(samples=...)",
}
# Other names of a hyperparameter, for the methods that have it; `sharpness` is a former name of ours.
_SYNONYMS = {"sharpness": "scope", "radius": "rho", "epsilon": "rho", "frequency": "k"}


class KeywordsOnly:
    """A ``__new__`` that checks the arguments before the ``__init__`` that ``dataclass`` writes.

    An object and not a function: autodoc would show a function's signature for every method.
    """

    def __call__(self, kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes the object that ``__init__`` fills."""
        if not inspect.isabstract(kind):
            _check_arguments(kind, args, kwargs)
        return object.__new__(kind)


def _check_arguments(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    accepted = _parameters(kind.__init__)
    names = [p.name for p in accepted]
    if args and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in accepted):
        raise TypeError(
            f"{kind.__name__} takes keyword arguments only, and no model parameters: call {_CALL} instead of "
            f"loss.backward(), or use {_WRAPPER}"
        )
    unknown = [name for name in kwargs if name not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in accepted):
        name = unknown[0]
        advice = suggest(name, [each for each in names if each != "state"])
        if _SYNONYMS.get(name) in names:
            advice = f"did you mean {_SYNONYMS[name]}?"
        elif not advice.startswith("did you mean"):
            advice = _ADVICE.get(name, advice)
        raise TypeError(f"{kind.__name__} has no hyperparameter {name}={shown(kwargs[name])}; {advice}")


@lru_cache(maxsize=256)
def _parameters(init: Callable[..., None]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(init).parameters.values())[1:]


def explain_missing_arguments(backward: Function) -> Function:
    """Makes ``method.backward(loss)`` raise an error that shows the right call. The signature stays."""
    names = ("model", "batch", "objective")

    @wraps(backward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < len(names) and (missing := [name for name in names[len(args) :] if name not in kwargs]):
            raise TypeError(
                f"{type(self).__name__}.backward is missing {', '.join(missing)}: call {_CALL} instead of "
                "loss.backward(). The objective returns one loss per instance, shape (N,), for example "
                "lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction='none')"
            )
        return backward(self, *args, **kwargs)

    return cast("Function", checked)


def explain_assignment(kind: type) -> None:
    """Makes ``method.rho = 0.1`` raise an error that shows how to change rho.

    ``dataclass`` writes a ``__setattr__`` into every frozen class and does not accept an existing one. So it is
    wrapped when the first method of a class is made.
    """
    for each in kind.__mro__[:-1]:
        own = vars(each).get("__setattr__")
        if own is not None and not hasattr(own, "__wrapped__"):
            setattr(each, "__setattr__", _explained(own))  # noqa: B010 - mypy forbids to assign to a method


def _explained(own: Any) -> Any:
    @wraps(own)
    def assign(self: Any, name: str, value: Any) -> None:
        try:
            own(self, name, value)
        except FrozenInstanceError:
            advice = f"use method = method.replace({name}={shown(value)})"
            raise FrozenInstanceError(f"{type(self).__name__} is frozen, cannot assign {name!r}: {advice}") from None

    return assign
