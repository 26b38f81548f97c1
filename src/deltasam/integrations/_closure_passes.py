"""The passes of a step through a closure that calls ``backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam._torch import is_view
from deltasam.methods import Method
from deltasam.parallel.refusals import inside_ddp_forward
from deltasam.step.cotangents import Cotangents
from deltasam.step.passes import Passes
from deltasam.step.precision import note_grids
from deltasam.step.quantized import require_ordinary
from deltasam.step.selection import differentiable

LOSSES_REMEDY = (
    'use MethodOptimizer(..., closure="losses") with a closure that returns losses of shape (N,), for example '
    'cross_entropy(model(inputs), labels, reduction="none"), and does not call backward()'
)
LIGHTNING_REMEDY = (
    "use manual optimization: set self.automatic_optimization = False, and in training_step call "
    "method.backward(self, batch, objective) and then the step() and zero_grad() of a plain optimizer"
)


class ClosurePasses(Passes):
    """Passes that read the gradient from ``.grad`` after a closure: one loss and its gradient, nothing per instance.

    DDP averages the gradients of every ``backward()``. The last pass needs that, and with ``scope="global"`` the
    others too. With ``"local"`` the others run in ``no_sync()``.
    ``updated`` are the parameters of the optimizer, which may be more than those of the model.
    """

    def __init__(
        self, method: Method, model: nn.Module, closure: Callable[[], Any], updated: Iterable[nn.Parameter] = ()
    ) -> None:
        self._method = method
        self._closure = closure
        self._updated = list(updated)
        # The batch is unknown. Its tensors are assumed to be on the device of the parameters.
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
        self.objective_kind = closure
        del self.objective, self.batches  # a method that reads them gets an error, see __getattr__

    def __getattr__(self, name: str) -> Any:
        if name in ("objective", "batches"):
            raise self._needs_losses()
        raise AttributeError(name)

    def gradient(
        self,
        weights: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        keep_side_effects: bool = True,
        params: Sequence[nn.Parameter] | None = None,
        cotangents: Cotangents | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the loss, shape (1,), and its gradient; restores ``.grad``."""
        if weights is not None or cotangents is not None:
            raise self._needs_losses()
        self.ranks.check(self.scope, self.params)
        targets = list(self.params.values()) if params is None else list(params)
        require_ordinary(targets, self.params)
        before = [(p, p.grad) for p in {*self.involved.values(), *self._updated}]
        try:
            for p, _ in before:
                p.grad = None
            with self._unshared(), differentiable(self.params):
                loss = self._run(keep_side_effects)
            grads = [_own(p.grad) for p in targets]
        finally:
            for p, grad in before:
                p.grad = grad
        return loss, self._shared(grads, targets)

    def _shared(self, grads: list[Tensor | None], targets: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """With ``scope="global"``, the mean over all processes for frozen parameters, too, which DDP does not know."""
        frozen = [k for k, p in enumerate(targets) if not p.requires_grad]
        if frozen and self.scope == "global" and self.ranks.replicated:
            means = self.ranks.mean_gradients([grads[k] for k in frozen], [targets[k] for k in frozen])
            for k, mean in zip(frozen, means, strict=True):
                grads[k] = mean
        return grads

    def accumulate(self, *, keep_side_effects: bool = False, cotangents: Cotangents | None = None) -> Tensor:
        """Returns the loss, shape (1,); its gradient is in ``.grad``."""
        if cotangents is not None:
            raise self._needs_losses()
        with self._unshared() if self.ranks.keeps_gradients else nullcontext():  # fresh_grads() averages at the end
            return self._run(keep_side_effects)

    def _unavailable(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._needs_losses()

    losses = evaluate = subset = _unavailable

    def _unshared(self) -> AbstractContextManager[None]:
        """With ``scope="local"``, ``backward()`` inside leaves the gradient of this process in ``.grad``."""
        if self.scope == "global":
            return nullcontext()
        return self.ranks.no_sync() if self.ranks.replicated else _refuse_wrapped_elsewhere(self.inner)

    def _needs_losses(self) -> ValueError:
        remedy = LIGHTNING_REMEDY if is_from_lightning(self._closure) else LOSSES_REMEDY
        return ValueError(
            f"{type(self._method).__name__} needs one loss per instance, but the closure calls backward() and returns "
            f"one loss: {remedy}"
        )

    def _run(self, keep_side_effects: bool) -> Tensor:
        self.count.forwards += 1
        self.count.backwards += 1
        with torch.enable_grad(), self.one_pass(keep_side_effects):
            loss = self._closure()
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss), device=self.device)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the closure returned {type(loss).__name__}, not the loss: end it with `return loss`")
        if loss.numel() != 1:
            raise ValueError(
                f"the closure returned a tensor of shape {tuple(loss.shape)} instead of one loss; for one loss per "
                f"instance {LOSSES_REMEDY}"
            )
        if all(p.grad is None for p in self.trainable.values()):
            raise ValueError(f"the closure left no gradient: call loss.backward() in it, or {LOSSES_REMEDY}")
        involved = list(self.involved.values())
        note_grids(self.inner, self.objective_kind, loss, involved, [p.grad for p in involved])
        return loss.detach().reshape(1)


@contextmanager
def _refuse_wrapped_elsewhere(model: nn.Module) -> Iterator[None]:
    """Raises a ValueError if the model runs inside a DDP that the optimizer does not know."""

    def check(*_: Any) -> None:
        if inside_ddp_forward(model):
            raise ValueError(
                f"the closure calls {type(model).__name__} through DistributedDataParallel, which averages the "
                "gradients of the ascent, but scope='local' needs those of this process: pass the wrapped model, "
                "MethodOptimizer(optimizer, method, ddp_model), or use scope='global'"
            )

    hook = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def wrapped(model: nn.Module) -> nn.Module:
    """Returns the DDP module that Lightning put around the model, or the model itself."""
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    outer = getattr(strategy, "model", None)
    return outer if isinstance(outer, DistributedDataParallel) and outer.module is model else model


def _own(grad: Tensor | None) -> Tensor | None:
    """Copies a gradient that is a view: the next backward may overwrite DDP's buckets."""
    return grad if grad is None or not is_view(grad) else grad.clone()


def is_from_lightning(closure: Any) -> bool:
    """Whether a closure comes from Lightning's automatic optimization, not from the user."""
    given = closure.args if isinstance(closure, partial) else ()
    return any(type(each).__name__ == "Closure" and "lightning" in type(each).__module__ for each in given)
