"""What a Trainer or an optimizer with a method must be given, and the clear words for what it got instead."""

from __future__ import annotations

from typing import Any

from deltasam.checks import shown
from deltasam.integrations._optimizer import MethodOptimizer
from deltasam.methods import Method


def check_method(method: Any) -> None:
    """Raises a TypeError for what is no method; a method that is wrapped already is told apart."""
    if isinstance(method, Method):
        return
    if isinstance(getattr(method, "method", None), Method):
        raise TypeError(
            f"method={type(method).__name__}({shown(method.method)}) wraps a method: pass the method itself, and "
            "capture=True or on_out_of_memory='split' beside it"
        )
    raise TypeError(f"method={shown(method)} must be a method such as DeltaSAM(rho=0.05)")


def refuse_unsupported(trainer: Any) -> None:
    """One clear error for each setting of a Trainer under which a method would silently do something else.

    Raises:
        ValueError: For DeepSpeed, ``nn.DataParallel``, and optimizers that step inside ``backward`` or call it.
    """
    name = type(trainer).__name__
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(f"{name} does not work with DeepSpeed, whose engine owns the backward pass: use DDP or FSDP")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{name} does not work with nn.DataParallel, which Trainer chooses for {trainer.args.n_gpu} GPUs in one "
            "process: launch with torchrun or accelerate, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    if isinstance(trainer.optimizer, MethodOptimizer):
        raise ValueError(
            f"optimizers: a MethodOptimizer takes the gradients itself, and so does {name}: pass the optimizer inside "
            "it, and the method as method="
        )
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or optimizer.endswith("layerwise"):
        raise ValueError(
            f"optim={optimizer!r} updates the weights inside the backward pass, also inside one at perturbed weights: "
            "choose an optimizer that steps afterwards"
        )
