"""Methods in the training loops of other libraries.

=========================================  ==========================================================================
:class:`MethodTrainer`                     Hugging Face ``Trainer``: ``MethodTrainer(model, args, method=DeltaSAM())``
:class:`Seq2SeqMethodTrainer`              the same for ``Seq2SeqTrainer``
:class:`SFTMethodTrainer`                  the same for TRL's ``SFTTrainer``
:class:`DPOMethodTrainer`                  the same for TRL's ``DPOTrainer``
:class:`SentenceTransformerMethodTrainer`  the same for sentence-transformers' trainer
:class:`MethodMixin`                       their common part, for your own ``Trainer`` subclass
:class:`WeightAverageCallback`             for any of them: evaluates and keeps an average of the weights (EMA, SWA)
:class:`MethodOptimizer`                   wraps any ``torch.optim.Optimizer``; its ``step`` takes a closure
:class:`LostError`                         raised by the trainers when a process that they need has died
=========================================  ==========================================================================

An Accelerate loop and Lightning's manual optimization need nothing from here: ``method.backward`` replaces
``loss.backward()``; see ``examples/``. Every name is imported on first use, so ``MethodOptimizer`` needs torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasam.integrations._averaging import WeightAverageCallback as WeightAverageCallback
    from deltasam.integrations._dpo import DPOMethodTrainer as DPOMethodTrainer
    from deltasam.integrations._mixin import MethodMixin as MethodMixin
    from deltasam.integrations._optimizer import MethodOptimizer as MethodOptimizer
    from deltasam.integrations._sentence import SentenceTransformerMethodTrainer as SentenceTransformerMethodTrainer
    from deltasam.integrations._sft import SFTMethodTrainer as SFTMethodTrainer
    from deltasam.integrations._trainer import MethodTrainer as MethodTrainer
    from deltasam.integrations._trainer import Seq2SeqMethodTrainer as Seq2SeqMethodTrainer
    from deltasam.integrations._worker_errors import LostError as LostError

_MODULES = {
    "DPOMethodTrainer": ("_dpo", "trl"),
    "LostError": ("_worker_errors", ""),
    "MethodMixin": ("_mixin", "hf"),
    "MethodOptimizer": ("_optimizer", ""),
    "MethodTrainer": ("_trainer", "hf"),
    "SFTMethodTrainer": ("_sft", "trl"),
    "SentenceTransformerMethodTrainer": ("_sentence", "sts"),
    "Seq2SeqMethodTrainer": ("_trainer", "hf"),
    "WeightAverageCallback": ("_averaging", "hf"),
}
"""Name -> its module, and the extra that installs the dependencies of the module."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, extra = _MODULES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if not extra or (error.name or "deltasam").startswith("deltasam"):
            raise
        message = f"{name} needs {error.name}: pip install 'deltasam[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
