"""Errors for arguments that a method does not have: the nearest name, or a line of advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import FrozenInstanceError, fields
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from deltasam.step.checks import shown
from deltasam.step.names import suggest

Function = TypeVar("Function", bound=Callable[..., Any])

_CALL = "method.backward(model, batch, objective)"
_OPTIMIZER = "it belongs to the optimizer, for example torch.optim.AdamW(model.parameters(), lr=...)"
_WRAPPER = f"step your optimizer after {_CALL}, or use deltasam.integrations.MethodOptimizer(optimizer, method, model)"
_ADVICE = {
    "adaptive": "use ASAM(rho=0.5)",
    **dict.fromkeys(("base_optimizer", "optimizer"), _WRAPPER),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum", "betas"), _OPTIMIZER),
    **dict.fromkeys(("model", "batch", "objective", "loss_fn", "criterion", "closure"), f"pass it to {_CALL}"),
    **dict.fromkeys(("rho_scheduler", "scheduler", "rho_max"), "call method = method.replace(rho=...) between steps"),
    **dict.fromkeys(("eps", "perturb_eps"), "a step with a zero gradient is skipped, so no division needs it"),
    "samples": "it belongs to the weighting: weighting=FiniteDifference(samples=...)",
    "sparsity": "FisherSAM has keep=, which is 1 - sparsity",
}
# Other names of a hyperparameter, for the methods that have it; `sharpness` is a former name of ours.
_SYNONYMS = {
    "sharpness": "scope",
    **dict.fromkeys(("radius", "epsilon"), "rho"),
    **dict.fromkeys(("frequency", "every"), "k"),
    "adv_init_mag": "init_magnitude",
    "adv_max_norm": "max_norm",
}


class KeywordsOnly:
    """A ``__new__`` that checks the arguments before the ``__init__`` that ``dataclass`` writes.

    An object and not a function: autodoc would show a function's signature for every method.
    """

    def __call__(self, kind: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes the object that ``__init__`` fills."""
        if not inspect.isabstract(kind):
            takes = _parameters(kind.__init__)
            if args and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in takes):
                example = f"{kind.__name__}({'rho=0.05' if 'rho' in {p.name for p in takes} else ''})"
                raise TypeError(
                    f"{kind.__name__} takes keyword arguments only, and no model parameters: write method = {example} "
                    f"and call {_CALL} instead of loss.backward(), or use "
                    "deltasam.integrations.MethodOptimizer(optimizer, method, model)"
                )
            unknown = [name for name in kwargs if name not in {p.name for p in takes}]
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in takes):
                known = [p.name for p in takes if p.name != "state"]
                raise TypeError(
                    f"{kind.__name__} has no hyperparameter {unknown[0]}={shown(kwargs[unknown[0]])}; "
                    f"{_advice(kind, unknown[0], known)}"
                )
        return object.__new__(kind)


@lru_cache(maxsize=256)
def _parameters(init: Callable[..., None]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(init).parameters.values())[1:]


def _advice(kind: type, name: str, known: Collection[str]) -> str:
    if _SYNONYMS.get(name) in known:
        return f"did you mean {_SYNONYMS[name]}?"
    near = suggest(name, known)
    if near.startswith("did you mean"):
        return near
    owners = _owners(kind, "__dataclass_fields__", name)
    return _ADVICE.get(name) or (f"it is for {owners}; here {near}" if owners else near)


def check_state(kind: type, names: Iterable[Any], known: Collection[str]) -> None:
    """Raises a ValueError for a state that the method does not keep.

    Args:
        kind: The class of the method.
        names: The names in the state.
        known: The names that the method keeps; a dot and anything else may follow.
    """
    name = next((str(name) for name in names if str(name).split(".")[0] not in known), None)
    if name is not None:
        owners = _owners(kind, "state_keys", name.split(".")[0])
        raise ValueError(
            f"state has {name!r}, which {f'belongs to {owners}' if owners else 'is unknown'}, not to {kind.__name__}: "
            f"pass what state_dict() of a {kind.__name__} returned, or {{}} to start afresh"
        )


def _owners(kind: type, table: str, name: str) -> str:
    """The methods of this package that have a name in one of their tables."""
    base = [each for each in kind.__mro__ if inspect.isabstract(each)][-1]
    kinds = [each for each in _subclasses(base) if each.__module__.startswith("deltasam.")]
    return ", ".join(each.__name__ for each in kinds if name in getattr(each, table, ()))


def _subclasses(kind: type) -> list[type]:
    return [kind for each in kind.__subclasses__() for kind in (each, *_subclasses(each))]


def explain_missing_arguments(backward: Function) -> Function:
    """Lets ``method.backward(loss)`` raise an error that shows the right call. The signature stays."""
    names = ("model", "batch", "objective")

    @wraps(backward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        missing = [name for name in names[len(args) :] if name not in kwargs]
        unknown = [name for name in kwargs if name not in (*names, "scale")]
        if missing:
            raise TypeError(
                f"{type(self).__name__}.backward is missing {', '.join(missing)}"
                f"{f' and does not take {unknown[0]}' if unknown else ''}: write {_CALL} instead of loss.backward(). "
                "It computes the losses itself: objective(model, batch) returns one per instance, shape (N,), for "
                "example deltasam.Classification() for Hugging Face models, or lambda model, batch: "
                "cross_entropy(model(batch[0]), batch[1], reduction='none')"
            )
        return backward(self, *args, **kwargs)

    return cast("Function", checked)


def explain_assignment(kind: type) -> None:
    """Lets ``method.rho = 0.1`` raise an error that shows how to change rho.

    ``dataclass`` writes a ``__setattr__`` into every frozen class and refuses one that is there before. It is wrapped
    when the first method of a class is made.
    """
    for each in kind.__mro__:
        own = vars(each).get("__setattr__")
        if each is not object and own is not None and not hasattr(own, "explains"):
            setattr(each, "__setattr__", _explained(own))  # noqa: B010 - mypy forbids to assign to a method


def _explained(own: Any) -> Any:
    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        try:
            own(self, name, value)
        except FrozenInstanceError:
            known = [f.name for f in fields(self) if f.init and f.compare]
            change = f"method = method.replace({name}={shown(value)})" if name in known else suggest(name, known)
            raise FrozenInstanceError(f"{type(self).__name__} is frozen, cannot assign {name!r}: {change}") from None

    __setattr__.explains = True  # type: ignore[attr-defined]
    return __setattr__
