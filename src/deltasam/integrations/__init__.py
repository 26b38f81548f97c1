"""Methods inside other people's training loops.

=========================================  ==========================================================================
:class:`MethodTrainer`                     Hugging Face ``Trainer``: ``MethodTrainer(model, args, method=DeltaSAM())``
:class:`Seq2SeqMethodTrainer`              the same over ``Seq2SeqTrainer``
:class:`SFTMethodTrainer`                  the same over TRL's ``SFTTrainer``
:class:`SentenceTransformerMethodTrainer`  the same over sentence-transformers' trainer
:class:`MethodMixin`                       the part they share, for a ``Trainer`` subclass of your own
:class:`MethodOptimizer`                   any ``torch.optim.Optimizer``, stepped with a closure
:class:`LostError`                         what the trainers raise when a process that they need has died
=========================================  ==========================================================================

An Accelerate loop and Lightning's manual optimization need nothing from here: ``method.backward`` takes the place of
``loss.backward()``; see ``examples/``. Every name is imported on first use, so that the closure adapter needs torch
alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.integrations._mixin import MethodMixin as MethodMixin
    from deltasam.integrations._optimizer import MethodOptimizer as MethodOptimizer
    from deltasam.integrations._sentence import SentenceTransformerMethodTrainer as SentenceTransformerMethodTrainer
    from deltasam.integrations._sft import SFTMethodTrainer as SFTMethodTrainer
    from deltasam.integrations._trainer import MethodTrainer as MethodTrainer
    from deltasam.integrations._trainer import Seq2SeqMethodTrainer as Seq2SeqMethodTrainer
    from deltasam.integrations._worker_errors import LostError as LostError

_HOME = {
    "LostError": "_worker_errors",
    "MethodMixin": "_mixin",
    "MethodOptimizer": "_optimizer",
    "MethodTrainer": "_trainer",
    "SFTMethodTrainer": "_sft",
    "SentenceTransformerMethodTrainer": "_sentence",
    "Seq2SeqMethodTrainer": "_trainer",
}

_EXTRAS = {"_mixin": "hf", "_trainer": "hf", "_sft": "trl", "_sentence": "sts"}
"""Module -> the extra that brings what it imports."""

__all__ = [
    "LostError",
    "MethodMixin",
    "MethodOptimizer",
    "MethodTrainer",
    "SFTMethodTrainer",
    "SentenceTransformerMethodTrainer",
    "Seq2SeqMethodTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    home = _HOME[name]
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if home not in _EXTRAS or (error.name or "deltasam").startswith("deltasam"):
            raise
        way_out = f"pip install 'deltasam[{_EXTRAS[home]}]'"
        raise ModuleNotFoundError(f"{name} needs {error.name}: {way_out}", name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
