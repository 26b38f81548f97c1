"""Checks of what a Trainer with a method is given."""

from __future__ import annotations

from typing import Any

from deltasam.integrations._optimizer import MethodOptimizer
from deltasam.methods import Method
from deltasam.objectives.nesting import innermost
from deltasam.step.checks import shown


def check_method(method: Any, trainer: str) -> None:
    """Raises a TypeError if ``method`` is missing or is not a method."""
    if method is None:
        raise TypeError(f"{trainer} needs a method, by keyword: {trainer}(..., method=SAM(rho=0.05))")
    if not isinstance(method, Method):
        raise TypeError(
            f"method={shown(method)} must be a method such as DeltaSAM(rho=0.05); instead of Captured or Splitting "
            "pass the method itself, with capture=True or on_out_of_memory='split'"
        )


def refuse_overrides(trainer: type, mixin: type, *, has_objective: bool, replaces: tuple[type, ...] = ()) -> None:
    """Raises a ValueError if a user's ``compute_loss`` or ``training_step`` would silently be ignored."""
    libraries = ("transformers.", "sentence_transformers.", "deltasam.")
    own = [each for each in trainer.__mro__ if not each.__module__.startswith(libraries)]
    with_loss = next((each for each in own if "compute_loss" in vars(each)), None)
    if with_loss is not None and not has_objective:
        raise ValueError(
            f"{with_loss.__name__}.compute_loss would not be used: it returns one loss for the batch, and a method "
            "needs one per instance. Pass objective=..., a callable objective(model, batch) -> losses of shape (N,), "
            f"or return one from a method default_objective(self) of {trainer.__name__}"
        )
    behind = set(trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]) - set(replaces)
    hidden = next((each for each in own if each in behind and "training_step" in vars(each)), None)
    if hidden is not None:
        raise ValueError(
            f"{hidden.__name__}.training_step would never be called: {mixin.__name__} replaces it. If the training "
            f"does not need it, write replaces = ({hidden.__name__},) in {trainer.__name__}. What it does need goes "
            f"into a training_step of {trainer.__name__}, which calls super().training_step"
        )


def check_label_smoothing(factor: float, objective: Any) -> None:
    """Raises a ValueError if training and evaluation would smooth the labels differently."""
    inner = innermost(objective)
    smoothing = getattr(inner, "label_smoothing", factor)
    if factor and smoothing != factor:
        raise ValueError(
            f"label_smoothing_factor={factor} applies to the evaluation, but the objective has label_smoothing="
            f"{smoothing}: pass {type(inner).__name__}(label_smoothing={factor}), or set label_smoothing_factor=0"
        )


def refuse_unsupported(trainer: Any, *, has_objective: bool = False) -> None:
    """Raises a ValueError for settings of a Trainer under which a method would silently do something else."""
    name = type(trainer).__name__
    if trainer.compute_loss_func is not None and not has_objective:
        raise ValueError(
            "compute_loss_func returns one loss for the batch, but a method needs one per instance: pass "
            "objective=..., a callable objective(model, batch) -> losses of shape (N,)"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(f"{name} does not work with DeepSpeed, whose engine owns the backward pass: use DDP or FSDP")
    parallelism: Any = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_enabled", False):
            size = getattr(parallelism, f"{kind}_size")
            raise ValueError(
                f"{name} does not work with parallelism_config({kind}_size={size}), which splits sequences between "
                "processes, but a method needs the loss of whole sequences: use DDP or FSDP alone"
            )
    if getattr(trainer.args, "activation_offloading", False):  # TRL's
        raise ValueError(
            "activation_offloading=True supports one forward and one backward pass, but a method makes several: set "
            "it to False; gradient_checkpointing=True also saves memory"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{name} does not work with nn.DataParallel, which Trainer uses for {trainer.args.n_gpu} GPUs in one "
            "process: launch with torchrun or accelerate, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if isinstance(trainer.optimizer, (Method, MethodOptimizer)):
        raise ValueError(
            f"optimizers={shown(trainer.optimizer)} must hold a plain optimizer of torch.optim: pass the method as "
            "method="
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or optimizer.endswith("layerwise"):
        instead = "adafactor" if "lomo" in optimizer else optimizer.removesuffix("_layerwise")
        raise ValueError(
            f"optim={optimizer!r} updates the weights inside the backward pass, also at perturbed weights: set "
            f"optim={instead!r}, which updates them afterwards"
        )
