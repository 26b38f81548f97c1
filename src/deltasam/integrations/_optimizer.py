"""A method and an optimizer as one optimizer, stepped with a closure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deltasam.integrations._closure_passes import LINES, MANUAL, ClosurePasses, is_lightnings, wrapped
from deltasam.methods import ASAM, ESAM, SAM, FisherSAM, Method, SubsetSAM
from deltasam.step.checks import shown

Closure = Literal["backward", "losses"]

_BACKWARD_LINES = """
    def closure():
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        return loss
    loss = optimizer.step(closure)"""


class MethodOptimizer(torch.optim.Optimizer):
    r"""Wraps any optimizer so that ``step(closure)`` updates with a method's gradient, as ``LBFGS`` takes a closure.

    For frameworks that insist on an optimizer; where you write the loop, ``method.backward`` is simpler and does more
    (accumulation, ``GradScaler``). The closure is called by ``step``, once per pass of the method, with the same
    random draws every time; it must compute a loss and nothing else: stepping the optimizer inside is refused. The
    step starts from zero gradients.

    The wrapper has no state: ``state``, ``param_groups``, ``defaults``, ``state_dict``, hooks and ``zero_grad`` are
    the optimizer's own, so learning-rate schedulers work on either, and a checkpoint written with the wrapper loads
    without it and the other way round. A method with state (``LookSAM``) has its own ``state_dict``.

    To clip, ``optimizer.register_step_pre_hook(clip)`` with a function ``def clip(*_): clip_grad_norm_(...)``, which
    returns nothing: it runs on the method's gradient, right before the update.

    With several processes, pass the model in its ``DistributedDataParallel``; in Lightning, the ``LightningModule``.
    The method's ``scope`` then holds as in ``method.backward``. With ``closure="backward"`` and ``"local"``, all
    passes except the last run in DDP's ``no_sync()``, so ``static_graph=True`` is refused; with ``"global"``, DDP
    averages the gradients of every pass. Sharded parameters (FSDP2) need ``"global"`` there.

    Cost: the method's passes; no extra memory.

    Args:
        optimizer: What updates the weights.
        method: What takes the gradient.
        model: The model that the closure uses, in its wrapper if it has one.
        closure: ``"backward"``: the closure is LBFGS-style, it zeroes the gradients, calls ``backward()`` and returns
            the loss; this serves the methods that need gradients alone (ERM, SAM, ASAM, GSAM, LookSAM, FisherSAM).
            ``"losses"``: it returns the losses of the instances, shape (N,), and calls no ``backward()``; this serves
            every method.

    Raises:
        TypeError: ``optimizer``, ``method`` or ``model`` is not one.
        ValueError: Unknown kind of closure, an optimizer that needs a closure itself, or one of another model.

    Example:
        >>> from deltasam import DeltaSAM
        >>> model, x = nn.Linear(2, 1), torch.ones(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = MethodOptimizer(sgd, DeltaSAM(), model, closure="losses")
        >>> loss = optimizer.step(lambda: model(x).squeeze(-1) ** 2)
        >>> bool(optimizer.step(lambda: model(x).squeeze(-1) ** 2) < loss)
        True
    """

    def __init__(  # not the base's: everything it would set up is the wrapped optimizer's
        self, optimizer: torch.optim.Optimizer, method: Method, model: nn.Module, *, closure: Closure = "backward"
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer={shown(optimizer)} must be a torch.optim.Optimizer, made already")
        if not isinstance(method, Method):
            raise TypeError(f"method={shown(method)} must be a method such as SAM(rho=0.05)")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={shown(model)} must be a torch.nn.Module, the one that the closure uses")
        if closure not in get_args(Closure):
            raise ValueError(f"closure={closure!r} must be one of {list(get_args(Closure))}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer=LBFGS evaluates the closure by itself: it cannot take a method's gradient")
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in updated for p in model.parameters()):
            raise ValueError(
                f"model ({type(model).__name__}) has none of the parameters that optimizer "
                f"({type(optimizer).__name__}) updates: make the optimizer from the parameters of this model"
            )
        self.optimizer = optimizer
        self.method = method
        self.model = model
        self.closure = closure
        self._stepping = False

    def step(self, closure: Callable[..., Any] | None = None, batch: Any = None) -> Tensor:  # type: ignore[override]
        """Takes the method's gradient through the closure and updates the weights.

        Args:
            closure: As the constructor says. With a ``batch``, it is called with (parts of) that.
            batch: For ``closure="losses"``: what the closure takes, if the method takes batches apart (SubsetSAM, or
                any with ``MicroBatches``).

        Returns:
            The loss at w, detached.

        Raises:
            TypeError: There is no closure.
            ValueError: The method needs the batch, or losses of the instances where the closure gives one loss, as
                Lightning's do; or Lightning or Accelerate accumulates, or Lightning clips what the method works on.
            RuntimeError: The closure steps an optimizer.
        """
        if closure is None:
            lines = LINES if self.closure == "losses" else _BACKWARD_LINES
            raise TypeError(f"step() needs a closure (in the Trainer use MethodTrainer); the lines to write:\n{lines}")
        if self._stepping:
            raise _steps_inside()
        _refuse_accelerate()
        # Where a LightningModule may be: the model, and what Lightning hands to its closures.
        _refuse_lightning(self.method, (self.model, *(closure.args if isinstance(closure, partial) else ())))
        if self.closure == "losses" and is_lightnings(closure):
            raise ValueError(
                "closure='losses' is not for Lightning's automatic optimization, whose closures call backward() and "
                f"return one loss: {MANUAL}"
            )
        if batch is None and self.closure == "losses" and isinstance(self.method, (ESAM, SubsetSAM)):
            raise ValueError(
                f"{type(self.method).__name__} takes a part of the batch: give it with optimizer.step(closure, batch)"
                ", the closure being one that takes the batch, or a part of it, as its argument"
            )
        self.optimizer.zero_grad()
        with self._no_steps():
            if self.closure == "losses":
                call = (lambda model, _: closure()) if batch is None else (lambda model, part: closure(part))
                step = self.method.backward(self.model, batch, call)
            else:
                updated = (p for group in self.optimizer.param_groups for p in group["params"])
                step = self.method.run_step(ClosurePasses(self.method, wrapped(self.model), closure, updated))
        self.optimizer.step()
        return step.loss

    @contextmanager
    def _no_steps(self) -> Iterator[None]:
        """Refuses every step of the wrapped optimizer: inside a closure the weights may be perturbed ones."""

        def refuse(*_: Any) -> None:
            raise _steps_inside()

        hook = self.optimizer.register_step_pre_hook(refuse)
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            hook.remove()

    # -- the optimizer's own -------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer, the very objects: a learning rate set here is set there."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """Defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's: it loads with and without the wrapper."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the wrapped optimizer's parameters."""
        self.optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Registers it with the wrapped optimizer: called when the method's gradient is there, before the update."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Registers it with the wrapped optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # asked for before there is one, while unpickling
            raise AttributeError(name)
        if name in ("first_step", "second_step"):  # of other packages' optimizers; not the wrapped one's fault
            raise AttributeError(
                f"MethodOptimizer has no {name}: step(closure) makes all passes of the method, and "
                "method.backward(model, batch, objective) does without a closure"
            )
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"MethodOptimizer({self.method!r}, closure={self.closure!r}, {self.optimizer!r})"


def _refuse_lightning(method: Method, modules: tuple[Any, ...]) -> None:
    """Raises a ValueError for what Lightning's automatic optimization does to the gradients of single passes."""
    for trainer in (getattr(module, "_trainer", None) for module in modules):
        batches, clip = getattr(trainer, "accumulate_grad_batches", 1), getattr(trainer, "gradient_clip_val", None)
        if batches > 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={batches}) adds up gradients before step(closure), which starts "
                "from zero, so that they would be lost: use manual optimization, method.backward(model, batch, "
                f"objective, scale=1 / {batches}) on every batch and optimizer.step() on every {batches}th"
            )
        # A shorter gradient points uphill all the same, which is all that these methods ask of the first pass.
        by_norm = getattr(trainer, "gradient_clip_algorithm", None) in (None, "norm")
        if clip and not method.is_erm() and not (by_norm and isinstance(method, (SAM, ASAM, FisherSAM))):
            raise ValueError(
                f"Trainer(gradient_clip_val={clip}) clips the gradient of every pass, and {type(method).__name__} "
                "would work on clipped ones: leave it out, and clip what comes of them, with "
                f"def clip(*_): torch.nn.utils.clip_grad_norm_(self.parameters(), {clip}) and "
                "optimizer.register_step_pre_hook(clip); or use manual optimization"
            )


def _refuse_accelerate() -> None:
    """Raises a ValueError where Accelerate accumulates: it keeps the closures of all micro-batches but the last."""
    module = sys.modules.get("accelerate.optimizer")
    if module is None:
        return
    steps = module.GradientState().num_steps  # one for the whole process
    frame = sys._getframe() if steps > 1 else None
    while frame is not None and frame.f_globals is not vars(module):  # who else calls this gets every closure
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={steps}) hands over the closure of the last of {steps} micro-"
            "batches only, and the others would be lost: leave it at 1; or, without MethodOptimizer, call "
            f"method.backward(model, batch, objective, scale=1 / {steps}) on each of them"
        )


def _steps_inside() -> RuntimeError:
    return RuntimeError(
        "the closure calls optimizer.step(): it must only compute the loss; step(closure) updates the weights itself, "
        "after the last pass"
    )
