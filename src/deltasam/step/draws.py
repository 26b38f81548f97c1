"""Finds which of the process-wide random streams (``random``, ``numpy.random``) the passes of a model draw from.

All threads share these streams. If one is rewound while a data-loading thread draws from it, the thread draws the
same numbers again. Few models use them, so while other threads are alive, only the streams that a model uses are
rewound. One pass shows which: a profile function sees the draws of its thread from ``random``; NumPy's functions
cannot be profiled, so wrappers that check the thread replace them for that pass.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from deltasam.step.numpy_stream import NumpyState
from deltasam.step.python_stream import PythonState
from deltasam.step.structure import Structure

STREAMS: Set[str] = frozenset(("python", "numpy"))

_MOST_EVENTS = 10_000_000  # per pass; a pass that compiles (torch.compile) has as many, the next one does not
_MOST_WATCHES = 3


class _PythonWatch:
    """Whether this thread draws from ``random``."""

    def __init__(self) -> None:
        self.drew = False
        self._start = random.getstate()
        self._left = _MOST_EVENTS

    def __enter__(self) -> _PythonWatch:
        if sys.getprofile() is None:
            sys.setprofile(self._profile)
        else:
            self._left = 0  # the function of another profiler (cProfile) could not be restored
        return self

    def __exit__(self, *_: object) -> None:
        if sys.getprofile() == self._profile:
            sys.setprofile(None)

    def _profile(self, _frame: Any, event: str, called: Any) -> None:
        self._left -= 1
        if event == "c_call" and getattr(called, "__self__", None) is random._inst:
            self.drew = self.drew or called.__name__ not in ("getstate", "setstate")  # torch.compile restores it
        if self.drew or self._left <= 0:
            sys.setprofile(None)

    def may_have_drawn(self) -> bool:
        return self.drew or (self._left <= 0 and random.getstate() != self._start)


class _NumpyWatch:
    """Whether this thread draws from ``numpy.random``."""

    def __init__(self) -> None:
        self.drew = False
        self._others_drew = False
        self._thread = threading.get_ident()
        self._module = getattr(sys.modules.get("numpy"), "random", None)
        self._own = {} if self._module is None else dict(_functions(self._module))
        self._start: Any = None
        self._end: Any = None

    def __enter__(self) -> _NumpyWatch:
        if self._module is not None:
            vars(self._module).update({name: self._noting(function) for name, function in self._own.items()})
            self._start = self._module.get_state()  # with the wrappers installed, as at the end
        return self

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._end = self._module.get_state()
            vars(self._module).update(self._own)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.drew = True
            else:
                self._others_drew = True
            return function(*args, **kwargs)

        return call

    def may_have_drawn(self) -> bool:
        if self._module is None:
            return "numpy" in sys.modules  # the pass has loaded it
        if self._start is None:  # an interruption came before the pass
            return False
        # A change that no wrapper saw was made by a function that was imported by name, in any thread.
        now = self._module.get_state() if self._end is None else self._end
        return self.drew or not (are_equal(self._start, now) or self._others_drew)


def _functions(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of ``numpy.random`` that draw from the global stream, or seed it."""
    for name, value in vars(module).items():
        if hasattr(value, "__wrapped__"):  # installed by the watch of another thread
            continue
        is_method = callable(value) and getattr(value, "__self__", None) is module.mtrand._rand
        if (is_method and name not in ("get_state", "set_state")) or name in ("seed", "ranf", "sample"):
            yield name, value


def are_equal(a: Any, b: Any) -> bool:
    """Whether two states of NumPy's stream are the same."""
    (kind, words, *rest), (other_kind, other_words, *other_rest) = a, b
    return bool(kind == other_kind and rest == other_rest and (words == other_words).all())


class Use:
    """The streams that a model in one mode draws from."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._open = set(STREAMS)
        self._watching: dict[str, _PythonWatch | _NumpyWatch] = {}
        self._watches = 0
        #: The states of Python's and NumPy's streams in the last step, if no pass has moved them.
        self.host_start: tuple[PythonState | None, NumpyState | None] = None, None

    def found(self) -> Set[str]:
        """The streams that it has drawn from so far, or may have."""
        self._found |= {name for name, watch in self._watching.items() if watch.may_have_drawn()}
        return frozenset(self._found)

    def streams(self) -> Set[str]:
        """The streams to rewind around an extra pass: all of them if no other thread is alive."""
        return STREAMS if threading.active_count() == 1 else self.found()

    def watched(self) -> AbstractContextManager[None]:
        """Finds which streams the pass inside draws from, unless that is known or no other thread is alive."""
        known = not self._open or self._watching or threading.active_count() == 1
        return nullcontext() if known else self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._found -= self._open
        self._watches += 1
        try:
            watches: dict[str, _PythonWatch | _NumpyWatch] = {"python": _PythonWatch(), "numpy": _NumpyWatch()}
            self._watching = {name: watches[name] for name in self._open}
            with ExitStack() as stack:
                for watch in self._watching.values():
                    stack.enter_context(watch)
                yield
            found, last = self.found(), self._watches == _MOST_WATCHES
            self._open = {name for name, each in self._watching.items() if name in found and not (each.drew or last)}
        finally:
            self.found()
            self._watching = {}


_USES: WeakKeyDictionary[nn.Module, dict[bytes, Use]] = WeakKeyDictionary()


def use_of(model: nn.Module, structure: Structure | None = None) -> Use:
    """The use of a model in its current mode; ``structure`` is that of the model, if the caller has it already."""
    modes = (Structure(model) if structure is None else structure).modes
    uses = _USES.get(model)
    if uses is None:
        uses = _USES[model] = {}
    found = uses.get(modes)
    if found is None:
        found = uses[modes] = Use()
    return found
