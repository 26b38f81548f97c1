"""Benchmarks: time, passes and memory of every method, compared with third-party implementations.

``deltasam bench step`` measures one training step; ``python -m deltasam.lab.bench.step`` does the same and needs only
torch and transformers. ``deltasam bench train`` compares whole trainings.

Your own scripts can call :func:`measure`, with :func:`candidates` or with your own :class:`Candidate` objects.
:func:`prepared` yields the steps themselves, for example for a profiler.

Names are imported on first use, so that the command line can read the options without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.lab.bench._candidates import Candidate as Candidate
    from deltasam.lab.bench._candidates import candidates as candidates
    from deltasam.lab.bench._measure import measure as measure
    from deltasam.lab.bench._measure import prepared as prepared

__all__ = ["Candidate", "candidates", "measure", "prepared"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module = "_measure" if name in ("measure", "prepared") else "_candidates"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
