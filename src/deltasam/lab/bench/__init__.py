"""What a step costs: time, passes and memory of every method beside the implementations people use today.

``deltasam bench step`` from an installation, or ``python -m deltasam.lab.bench.step`` where there is only torch and
transformers; ``deltasam bench train`` compares whole trainings. Parts: ``options`` (what to measure), ``_workbench``
(model, batch, objective), ``_candidates`` (our methods and the field's), ``_optimizers`` (what is behind them),
``_passes`` (counted by hooks), ``_memory``, ``_engine`` (how the per-instance engine keeps the layers), ``_clock``
(interleaved rounds), ``isolate`` (perturb and restore alone), ``report`` (table, JSON), ``_plot``, ``train``.

Scripts of one's own measure by :func:`measure`, with :func:`candidates` or with :class:`Candidate` of their own;
:func:`prepared` gives the steps themselves, for a profiler.
Every name is imported on first use: the commands look at the options without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.lab.bench._candidates import Candidate as Candidate
    from deltasam.lab.bench._candidates import candidates as candidates
    from deltasam.lab.bench._measure import measure as measure
    from deltasam.lab.bench._measure import prepared as prepared

_HOME = {
    "Candidate": "_candidates", "candidates": "_candidates", "measure": "_measure", "prepared": "_measure",
}  # fmt: skip

__all__ = ["Candidate", "candidates", "measure", "prepared"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
