"""A method and an optimizer combined into one optimizer, whose ``step`` takes a closure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deltasam.integrations._closure_passes import LIGHTNING_REMEDY, ClosurePasses, is_from_lightning, wrapped
from deltasam.methods import Method
from deltasam.step.checks import shown
from deltasam.step.radius import Radius

Closure = Literal["backward", "losses"]
_STEPPED_INSIDE = (
    "the closure calls optimizer.step(), but it must only compute the loss: step(closure) updates the weights after "
    "the last pass"
)


class MethodOptimizer(torch.optim.Optimizer):
    r"""Wraps any optimizer so that ``step(closure)`` updates with a method's gradient, as ``LBFGS`` takes a closure.

    Use it in frameworks that require an optimizer. In your own loop ``method.backward`` is simpler and supports more
    (accumulation, ``GradScaler``). ``step`` starts from zero gradients and calls the closure once per pass of the
    method, with the same random draws each time. The closure must only compute a loss; stepping the optimizer in it
    raises an error.

    The wrapper has no state: ``state``, ``param_groups``, ``defaults``, ``state_dict``, hooks and ``zero_grad`` are
    those of the wrapped optimizer. So learning-rate schedulers work on either, and checkpoints load with and without
    the wrapper. A method with state (``LookSAM``) has its own ``state_dict``. A radius with a schedule learns the
    learning rate of the first parameter group from here, relative to ``initial_lr``, which schedulers store.

    To clip, call ``optimizer.register_step_pre_hook(clip)`` with ``def clip(*_): clip_grad_norm_(...)``. The hook runs
    on the method's gradient, right before the update.

    With several processes, pass the model in its ``DistributedDataParallel``; in Lightning, the ``LightningModule``.
    The method's ``scope`` then works as in ``method.backward``. With ``closure="backward"`` and ``"local"``, all
    passes except the last run in DDP's ``no_sync()``, so ``static_graph=True`` raises an error. With ``"global"``, DDP
    averages the gradients of every pass. Sharded parameters (FSDP2) need ``"global"`` with this closure.

    Cost: the passes of the method; no extra memory.

    Args:
        optimizer: Updates the weights.
        method: Computes the gradient.
        model: The model that the closure uses, in its wrapper if it has one.
        closure: ``"backward"``: an LBFGS-style closure, which zeroes the gradients, calls ``backward()`` and returns
            the loss. It suits methods that need gradients alone (ERM, SAM, ASAM, GSAM, LookSAM, FisherSAM).
            ``"losses"``: the closure returns the losses of the instances, shape (N,), and does not call
            ``backward()``. It suits every method.

    Raises:
        TypeError: ``optimizer``, ``method`` or ``model`` has the wrong type.
        ValueError: ``closure`` is unknown, the optimizer evaluates the closure itself (LBFGS), or it updates no
            parameter of the model.

    Example:
        >>> from deltasam import DeltaSAM
        >>> _ = torch.manual_seed(0)
        >>> model, x = nn.Linear(2, 1), torch.ones(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = MethodOptimizer(sgd, DeltaSAM(), model, closure="losses")
        >>> loss = optimizer.step(lambda: model(x).squeeze(-1) ** 2)
        >>> bool(optimizer.step(lambda: model(x).squeeze(-1) ** 2) < loss)
        True
    """

    def __init__(  # does not call the base: the wrapped optimizer has all of its attributes
        self, optimizer: torch.optim.Optimizer, method: Method, model: nn.Module, *, closure: Closure = "backward"
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={shown(optimizer)} must be an instance of torch.optim.Optimizer")
        if not isinstance(method, Method):
            raise TypeError(f"method={shown(method)} must be a method such as SAM(rho=0.05)")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={shown(model)} must be the torch.nn.Module that the closure uses")
        if closure not in get_args(Closure):
            raise ValueError(f"closure={closure!r} must be one of {list(get_args(Closure))}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer=LBFGS evaluates the closure itself, so it cannot use the gradient of a method")
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in updated for p in model.parameters()):
            raise ValueError(
                f"optimizer ({type(optimizer).__name__}) updates no parameter of model ({type(model).__name__}): "
                "create it with model.parameters()"
            )
        self.optimizer = optimizer
        self.method = method
        self.model = model
        self.closure = closure
        self._stepping = False

    def step(self, closure: Callable[..., Any] | None = None, batch: Any = None) -> Tensor:  # type: ignore[override]
        """Computes the method's gradient through the closure and updates the weights.

        Args:
            closure: The closure, as described for the constructor. With a ``batch`` it is called with (parts of) it.
            batch: For ``closure="losses"``: the argument of the closure, if the method splits batches (SubsetSAM, or
                any method with ``MicroBatches``).

        Returns:
            The loss at w, detached.

        Raises:
            TypeError: There is no closure.
            ValueError: The method needs the batch, or one loss per instance; Lightning or Accelerate accumulates
                gradients; or Lightning clips gradients that the method needs unclipped.
            RuntimeError: The closure steps an optimizer.
        """
        if closure is None:
            wanted = "calls loss.backward() and returns loss" if self.closure == "backward" else "returns losses (N,)"
            raise TypeError(
                f"step() needs a closure that {wanted}; in the Hugging Face Trainer use MethodTrainer, with a "
                "GradScaler (fp16) method.backward(model, batch, objective, scale=scaler)"
            )
        if self._stepping:
            raise RuntimeError(_STEPPED_INSIDE)
        _refuse_accelerate()
        # A LightningModule may be the model, or an argument of Lightning's closure.
        _refuse_lightning(self.method, (self.model, *(closure.args if isinstance(closure, partial) else ())))
        if self.closure == "losses" and is_from_lightning(closure):
            raise ValueError(
                "closure='losses' does not work with Lightning's automatic optimization, whose closures call "
                f"backward() and return one loss: {LIGHTNING_REMEDY}"
            )
        if batch is None and self.closure == "losses" and self.method.subsets_batch:
            raise ValueError(
                f"{type(self.method).__name__} uses a part of the batch: call optimizer.step(closure, batch) with a "
                "closure that takes the batch, or a part of it"
            )
        self.optimizer.zero_grad()
        self._set_progress()
        with self._no_steps():
            if self.closure == "losses":
                call = (lambda model, _: closure()) if batch is None else (lambda model, part: closure(part))
                step = self.method.backward(self.model, batch, call)
            else:
                updated = (p for group in self.optimizer.param_groups for p in group["params"])
                step = self.method.run_step(ClosurePasses(self.method, wrapped(self.model), closure, updated))
        self.optimizer.step()
        return step.loss

    def _set_progress(self) -> None:
        """Sets the learning rate relative to its peak, which schedulers store, for a radius that is scheduled."""
        group = self.optimizer.param_groups[0]
        if isinstance(getattr(self.method, "rho", None), Radius) and group.get("initial_lr"):
            known = self.method.state.get("progress", {})
            self.method.set_progress(**{**known, "lr": float(group["lr"]) / float(group["initial_lr"])})

    @contextmanager
    def _no_steps(self) -> Iterator[None]:
        """Forbids steps of the wrapped optimizer: inside a closure the weights may be perturbed."""

        def refuse(*_: Any) -> None:
            raise RuntimeError(_STEPPED_INSIDE)

        hook = self.optimizer.register_step_pre_hook(refuse)
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            hook.remove()

    # -- delegated to the wrapped optimizer ---------------------------------------------------------------------------

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"MethodOptimizer({self.method!r}, closure={self.closure!r}, {self.optimizer!r})"


def _refuse_lightning(method: Method, modules: tuple[Any, ...]) -> None:
    """Raises a ValueError if Lightning accumulates, or clips gradients of single passes that the method needs."""
    for trainer in (getattr(module, "_trainer", None) for module in modules):
        batches, clip = getattr(trainer, "accumulate_grad_batches", 1), getattr(trainer, "gradient_clip_val", None)
        if batches > 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={batches}) accumulates gradients before step(closure), which "
                "discards them: use manual optimization, with method.backward(model, batch, objective, "
                f"scale=1 / {batches}) on every batch and optimizer.step() on every {batches}th"
            )
        # Clipping by norm keeps the direction, and these methods use nothing else of the first gradient.
        by_norm = getattr(trainer, "gradient_clip_algorithm", None) in (None, "norm")
        if clip and not method.is_erm() and not (by_norm and method.uses_direction_only):
            raise ValueError(
                f"Trainer(gradient_clip_val={clip}) clips the gradient of every pass, which changes "
                f"{type(method).__name__}: clip the final gradient in optimizer.register_step_pre_hook(clip), with "
                f"def clip(*_): clip_grad_norm_(self.parameters(), {clip}), or use manual optimization"
            )


def _refuse_accelerate() -> None:
    """Raises a ValueError if Accelerate accumulates: it passes on the closure of the last micro-batch only."""
    module = sys.modules.get("accelerate.optimizer")
    if module is None:
        return
    steps = module.GradientState().num_steps  # one state per process
    frame = sys._getframe() if steps > 1 else None
    while frame is not None and frame.f_globals is not vars(module):  # other callers get every closure
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={steps}) passes on the closure of the last of {steps} micro-"
            "batches only, so the others would be lost: set it to 1, or use method.backward(model, batch, objective, "
            f"scale=1 / {steps}) on each micro-batch instead of MethodOptimizer"
        )
