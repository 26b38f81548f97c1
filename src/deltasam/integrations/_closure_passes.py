"""The passes of a step through a closure that calls ``backward()`` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam.methods import Method
from deltasam.parallel.distributed import inside_ddp_forward
from deltasam.step.passes import Passes
from deltasam.step.precision import note_grids

LINES = """
    optimizer = MethodOptimizer(torch.optim.AdamW(model.parameters()), method, model, closure="losses")
    def closure():
        return cross_entropy(model(inputs), labels, reduction="none")  # shape (N,), no backward()
    loss = optimizer.step(closure)"""

MANUAL = """use manual optimization; the lines to write:

    self.automatic_optimization = False  # in __init__
    # in training_step, the optimizer being a plain one:
    optimizer = self.optimizers()
    optimizer.zero_grad()
    method.backward(self, batch, objective)  # objective(self, batch) -> losses of shape (N,)
    optimizer.step()"""


class ClosurePasses(Passes):
    """Passes whose gradient is what a closure leaves in ``.grad``: one loss and its gradient, nothing per instance.

    DDP averages the gradients of every ``backward()``. That is right for the last pass, and for the others with
    ``scope="global"``. With ``"local"`` the others run in its ``no_sync()``.

    Args:
        method: The method whose step this is.
        model: The model that the closure uses, in its wrapper.
        closure: Zeroes the gradients (or not), computes the loss, calls ``backward()`` and returns the loss.
        updated: What the optimizer updates. It may be more than the model: ``backward()`` fills the ``.grad`` of all.
    """

    def __init__(
        self, method: Method, model: nn.Module, closure: Callable[[], Any], updated: Iterable[nn.Parameter] = ()
    ) -> None:
        self._method = method
        self._closure = closure
        self._updated = list(updated)
        self._hidden: dict[str, Any] | None = {}
        # Nothing is known of the closure's batch. Its tensors are taken to be where the parameters are.
        super().__init__(
            model,
            None,
            lambda *_: self.evaluate(),
            params=method.params,
            randomness=method.randomness,
            scope=method.scope,
            replay=not method.is_erm(),
            seed=method.step_seed,
        )
        self._kind = closure
        self._hidden = None  # from here on a method that looks at the batch or the objective is refused

    @property
    def objective(self) -> Any:  # type: ignore[override]
        """There is none."""
        return self._look("objective")

    @objective.setter
    def objective(self, value: Any) -> None:
        self._look("objective", value)

    @property
    def batches(self) -> Any:  # type: ignore[override]
        """There are none."""
        return self._look("batches")

    @batches.setter
    def batches(self, value: Any) -> None:
        self._look("batches", value)

    def _look(self, name: str, *value: Any) -> Any:
        if self._hidden is None:
            raise self._needs_losses()
        if value:
            self._hidden[name] = value[0]
        return self._hidden[name]

    def gradient(
        self,
        weights: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        keep_side_effects: bool = True,
        params: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, shape (1,), and its gradient; ``.grad`` is put back."""
        if weights is not None:
            raise self._needs_losses()
        self.ranks.check(self.scope)
        targets = list(self.params.values()) if params is None else list(params)
        before = [(p, p.grad) for p in {*self.trainable.values(), *self._updated}]
        try:
            for p, _ in before:
                p.grad = None
            with self._unshared():
                loss = self._run(keep_side_effects)
            return loss, [_own(p.grad) for p in targets]
        finally:
            for p, grad in before:
                p.grad = grad

    def accumulate(self, *, keep_side_effects: bool = False) -> Tensor:
        """The loss, shape (1,), its gradient being in ``.grad``."""
        with self._unshared() if self.ranks.apart else nullcontext():  # apart: fresh_grads() shares them at the end
            return self._run(keep_side_effects)

    def losses(self, *, keep_side_effects: bool = False, concurrent: bool = False) -> Tensor:
        """There are none."""
        raise self._needs_losses()

    def evaluate(self, at_w: Mapping[str, Tensor] | None = None) -> Tensor:
        """There is nothing without a gradient."""
        raise self._needs_losses()

    def subset(self, index: Tensor) -> Passes:
        """There is no batch."""
        raise self._needs_losses()

    def _unshared(self) -> AbstractContextManager[None]:
        """With ``scope="local"``, ``backward()`` leaves this process's own gradient in ``.grad`` inside."""
        if self.scope == "global":
            return nullcontext()
        return self.ranks.quiet() if self.ranks.replicated else _refuse_wrapped_elsewhere(self.inner)

    def _needs_losses(self) -> ValueError:
        return needs_losses(self._method, self._closure)

    def _run(self, keep_side_effects: bool) -> Tensor:
        self.count.forwards += 1
        self.count.backwards += 1
        with torch.enable_grad(), self._pass(keep_side_effects):
            loss = self._closure()
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss), device=self.device)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the closure returned {type(loss).__name__}, not the loss: end it with `return loss`")
        if loss.numel() != 1:
            raise ValueError(
                f"the closure returned losses of shape {tuple(loss.shape)}: to give the losses of the instances, "
                "shape (N,), call no backward() in it and say MethodOptimizer(..., closure='losses')"
            )
        if all(p.grad is None for p in self.trainable.values()):
            raise ValueError(
                "the closure left no gradient: call loss.backward() in it, or return the losses of the instances, "
                "shape (N,), and say MethodOptimizer(..., closure='losses')"
            )
        trained = list(self.trainable.values())
        note_grids(self.inner, self._kind, loss, trained, [p.grad for p in trained])
        return loss.detach().reshape(1)


@contextmanager
def _refuse_wrapped_elsewhere(model: nn.Module) -> Iterator[None]:
    """Raises a ValueError where the model runs inside of a DDP that the optimizer was not given."""

    def check(*_: Any) -> None:
        if inside_ddp_forward(model):
            raise ValueError(
                f"the closure calls {type(model).__name__} through DistributedDataParallel, which averages the "
                "gradients of the ascent, but scope='local' needs this process's own: pass the wrapped model, "
                "MethodOptimizer(optimizer, method, ddp_model), or scope='global' to the method"
            )

    hook = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def wrapped(model: nn.Module) -> nn.Module:
    """The DDP that Lightning has put around a module, or the model itself."""
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    outer = getattr(strategy, "model", None)
    return outer if isinstance(outer, DistributedDataParallel) and outer.module is model else model


def _own(grad: Tensor | None) -> Tensor | None:
    """The gradient; a copy of a view, which may be one into DDP's buckets: the next backward writes into them."""
    return grad if grad is None or not grad._is_view() else grad.clone()


def is_lightnings(closure: Any) -> bool:
    """Whether a closure is that of Lightning's automatic optimization, and not one that a user has handed to it."""
    given = closure.args if isinstance(closure, partial) else ()
    return any(type(each).__name__ == "Closure" and "lightning" in type(each).__module__ for each in given)


def needs_losses(method: Method, closure: Any) -> ValueError:
    """The error for a method that asks for more than gradients."""
    needs = f"{type(method).__name__} needs the loss of every instance, which "
    if is_lightnings(closure):
        return ValueError(f"{needs}Lightning's automatic optimization cannot give: {MANUAL}")
    return ValueError(
        f"{needs}a closure that calls backward() and returns one loss cannot give; the lines to write:\n{LINES}"
    )
