"""Arguments without a keyword, such as the parameters that an optimizer is given, are answered with the way out."""

from __future__ import annotations

import inspect
from typing import Any


class KeywordsOnly:
    """A ``__new__`` that says how a method is made, where Python would count positional arguments.

    ``dataclass`` writes the ``__init__`` of every class, so that nothing can be said there. No function on purpose:
    autodoc would then show this signature, for every method, and not that of its hyperparameters.
    """

    def __call__(self, kind: type, /, *args: Any, **kwargs: Any) -> Any:
        """An object that ``__init__`` is to fill."""
        if args and not _takes_positions(kind):
            raise TypeError(_words(kind))
        return object.__new__(kind)


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
