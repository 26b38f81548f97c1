"""What a Trainer or an optimizer with a method must be given, and the clear words for what it got instead."""

from __future__ import annotations

from typing import Any

from deltasam.integrations._optimizer import MethodOptimizer
from deltasam.methods import Method
from deltasam.objectives.nesting import innermost
from deltasam.step.checks import shown


def check_method(method: Any, trainer: str) -> None:
    """Raises a TypeError for what is no method; none at all, and one that is wrapped already, are told apart."""
    if isinstance(method, Method):
        return
    if method is None:
        raise TypeError(f"{trainer} needs a method, by keyword: {trainer}(..., method=SAM(rho=0.05))")
    if isinstance(getattr(method, "method", None), Method):
        raise TypeError(
            f"method={type(method).__name__}({shown(method.method)}) wraps a method: pass the method itself, and "
            "capture=True or on_out_of_memory='split' beside it"
        )
    raise TypeError(f"method={shown(method)} must be a method such as DeltaSAM(rho=0.05)")


def refuse_overrides(trainer: type, mixin: type, *, has_objective: bool, accounted_for: tuple[type, ...] = ()) -> None:
    """One clear error where a Trainer's own loss, or own step, would be left out without a word.

    Args:
        trainer: The class of the trainer.
        mixin: What takes its gradients; a ``training_step`` of a class behind it is never called.
        has_objective: Whether the user has said what is to be minimized.
        accounted_for: Classes whose loss and step are known, and made up for.

    Raises:
        ValueError: A class of the user's own has a ``compute_loss``, and there is no objective; or it has a
            ``training_step`` that cannot be reached.
    """
    libraries = ("transformers.", "sentence_transformers.", "deltasam.")
    own = [each for each in trainer.__mro__ if not each.__module__.startswith(libraries) and each not in accounted_for]
    weighed = next((each for each in own if "compute_loss" in vars(each)), None)
    if weighed is not None and not has_objective:
        raise ValueError(
            f"{weighed.__name__}.compute_loss returns one loss for the batch, a method needs one per instance, and "
            "the training would not use it: pass objective=..., a callable objective(model, batch) -> losses of shape "
            "(N,)"
        )
    behind = trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]
    hidden = next((each for each in own if each in behind and "training_step" in vars(each)), None)
    if hidden is not None:
        raise ValueError(
            f"{hidden.__name__}.training_step would never be called: the method's takes its place. Put it into a "
            f"class before {mixin.__name__}, and call super().training_step there"
        )


def refuse_other_smoothing(factor: float, objective: Any) -> None:
    """One clear error for labels that the evaluation would smooth, and the training not, or otherwise.

    Args:
        factor: ``TrainingArguments.label_smoothing_factor``, which Trainer's evaluation goes by.
        objective: What the user wants minimized; of a callable nobody can tell what it smooths.

    Raises:
        ValueError: The objective has another one.
    """
    inner = innermost(objective)
    smoothing = getattr(inner, "label_smoothing", factor)
    if factor and smoothing != factor:
        name = type(inner).__name__
        raise ValueError(
            f"label_smoothing_factor={factor} is for the evaluation and an inferred objective, but the one that was "
            f"given has label_smoothing={smoothing}: pass {name}(label_smoothing={factor}), or leave "
            "label_smoothing_factor at 0"
        )


def refuse_unsupported(trainer: Any) -> None:
    """One clear error for each setting of a Trainer under which a method would silently do something else.

    Raises:
        ValueError: For a loss function of the batch, DeepSpeed, context and sequence parallelism, ``nn.DataParallel``,
            optimizers that step inside ``backward`` or call it, and a method in the place of an optimizer.
    """
    name = type(trainer).__name__
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func returns one loss for the batch, a method needs one per instance: pass objective=..., a "
            "callable objective(model, batch) -> losses of shape (N,), instead"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(f"{name} does not work with DeepSpeed, whose engine owns the backward pass: use DDP or FSDP")
    divided: Any = getattr(trainer.accelerator, "parallelism_config", None)
    kind = next((kind for kind in ("cp", "sp") if getattr(divided, f"{kind}_enabled", False)), None)
    if kind is not None:
        size = f"{kind}_size={getattr(divided, f'{kind}_size')}"
        raise ValueError(
            f"{name} does not work with parallelism_config({size}), which divides the sequences among the processes, "
            "where a method needs the loss of whole ones: use DDP or FSDP alone"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{name} does not work with nn.DataParallel, which Trainer chooses for {trainer.args.n_gpu} GPUs in one "
            "process: launch with torchrun or accelerate, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    if isinstance(trainer.optimizer, Method):
        raise ValueError(
            f"optimizers: {shown(trainer.optimizer)} is a method, not an optimizer: pass it as method=, and leave the "
            "optimizer to optim= and learning_rate= of TrainingArguments, or make one of torch.optim"
        )
    if isinstance(trainer.optimizer, MethodOptimizer):
        raise ValueError(
            f"optimizers: a MethodOptimizer takes the gradients itself, and so does {name}: pass the optimizer inside "
            "it, and the method as method="
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or optimizer.endswith("layerwise"):
        raise ValueError(
            f"optim={optimizer!r} updates the weights inside the backward pass, also at perturbed weights: set "
            f"optim={_stepping_afterwards(optimizer)}, which steps after it"
        )


def _stepping_afterwards(optimizer: str) -> str:
    """An optimizer in the place of one that steps inside ``backward``."""
    if "lomo" in optimizer:
        return "'adafactor', whose state is small too, or 'paged_adamw_8bit' (needs bitsandbytes)"
    return repr(optimizer.removesuffix("_layerwise"))
