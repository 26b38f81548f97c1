"""A method whose steps are recorded as CUDA graphs and replayed."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasam.methods import Method, Step
from deltasam.objectives.nesting import with_weights
from deltasam.parallel.shards import sharded_modules
from deltasam.speed.capture._constants import HostConstants
from deltasam.speed.capture._graph import Observed, Pool, RecordedStep
from deltasam.speed.capture._key import (
    NotCapturableError,
    Same,
    batch_key,
    method_key,
    model_key,
    objective_key,
    surroundings_key,
)
from deltasam.speed.capture._streams import Needs
from deltasam.step.batches import MicroBatches
from deltasam.step.counts import HostShares, host_shares
from deltasam.step.passes import ObjectiveLike, Passes, Scaler, prepare_objective
from deltasam.step.radius import Numbers
from deltasam.step.randomness import observed
from deltasam.step.step_batch import prepared

HAS_GRAPHS = ("cuda",)
_TOO_MANY = (
    "graphs are evicted before they are replayed. The steps have more shapes than max_graphs={}: pad the batches "
    "(PadToBuckets), or raise max_graphs. Or a graph contains what differs from step to step: a new objective (make "
    "it once), or Python numbers in the batch (make them tensors)"
)
Take = Callable[[Passes], Step]  # runs the step; an ordinary one is also counted
Run = Callable[[Any, Take], Step]


@dataclass
class CaptureReport:
    """The counts of a :class:`Captured` so far: steps by kind, evicted graphs, and steps by obstacle."""

    ordinary: int = 0
    recorded: int = 0
    replayed: int = 0
    evicted: int = 0
    obstacles: dict[str, int] = field(default_factory=dict)


class Captured:
    """A method whose ``backward`` is recorded as one CUDA graph per batch shape and then replayed.

    Fine-tuning steps of base-sized models are bound by kernel launches; a replayed graph launches once. All passes of
    the step, the perturbation, restoring the weights and the gradient norms are in the graph. The gradients are those
    of the ordinary step up to rounding, dropout included: new masks in every step, the same masks in all passes of a
    step.

    The first batch of a shape runs as an ordinary step, which serves as warm-up; the second is recorded. (A method
    with buffers allocates them in its first step, and needs one ordinary step more.) A step that cannot be recorded
    (the model synchronises with the host, draws on the host, ...) runs as an ordinary one, and a warning names the
    reason. On the CPU every step is an ordinary one. A step over :class:`~deltasam.MicroBatches` is one graph. Python
    numbers in the model, and constants that it makes on the host, stay as they were when the step was recorded.

    Extra memory: the graphs share one pool, about the memory of one ordinary step, plus one copy of the gradients.

    Args:
        method: The method. Its hyperparameters are part of the recording: after ``captured.method =
            captured.method.replace(eta=...)`` steps are recorded anew. The numbers of the radius are in the memory of
            the device: ``replace(rho=...)`` and schedules record nothing.
        max_graphs: How many recordings to keep, one per shape and method; the least recently used one is evicted
            first. :class:`PadToBuckets` keeps the number of shapes small.
        optimizer: Enables :meth:`step`, which also records the optimizer's step. It must be capturable, like
            ``torch.optim.AdamW(..., capturable=True)``; its learning rates become tensors, so that schedules work.
        max_grad_norm: Clip before the optimizer's step; only with ``optimizer``.

    Example:
        >>> from deltasam import SAM
        >>> method = Captured(SAM(rho=0.05))  # used like the method itself
        >>> method.backward(nn.Linear(2, 1), torch.ones(4, 2), lambda m, x: m(x).squeeze(-1) ** 2).forwards
        2
    """

    def __init__(
        self,
        method: Method,
        *,
        max_graphs: int = 8,
        optimizer: torch.optim.Optimizer | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs!r} must be at least 1")
        if max_grad_norm is not None and optimizer is None:
            raise ValueError("max_grad_norm needs an optimizer: without one, clip after backward() as usual")
        self.method = method
        self.report = CaptureReport()
        self._max_graphs = max_graphs
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._seen: OrderedDict[Hashable, Observed | RecordedStep | str] = OrderedDict()
        self._gradients: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        self._named: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[str, nn.Parameter]]] = WeakKeyDictionary()
        self._pool: Pool | None = None
        if optimizer is not None:
            _check_capturable(optimizer)

    def __getattr__(self, name: str) -> Any:
        """Delegates everything else to the method: ``state_dict``, ``rho``, ``skipped``, ..."""
        if name == "method":  # a copy under construction has none yet
            raise AttributeError(name)
        return getattr(self.method, name)

    def backward(
        self, model: nn.Module, batch: Any, objective: ObjectiveLike, *, scale: float | Tensor | Scaler = 1.0
    ) -> Step:
        """As :meth:`deltasam.methods.Method.backward`: adds the method's gradient to ``.grad``."""
        factor = scale if isinstance(scale, Tensor) else None

        def run(inputs: Any, take: Take) -> Step:
            batch, factor = inputs
            return take(self.method.passes_for(model, batch, objective, scale=scale if factor is None else factor))

        number: Hashable = scale if isinstance(scale, (int, float)) else Same(scale) if factor is None else "tensor"
        prepare_objective(objective, model)
        return self._take(model, (batch, factor), objective, run, ("backward", number))

    def step(self, model: nn.Module, batch: Any, objective: ObjectiveLike) -> Step:
        """The whole training step: gradients, clipping, the optimizer's step. ``.grad`` is None afterwards.

        Raises:
            ValueError: No optimizer was given.
        """
        optimizer = self._optimizer
        if optimizer is None:
            raise ValueError(
                "Captured(method) has no optimizer: pass optimizer=, or call backward() and step it yourself"
            )

        def run(inputs: Any, take: Take) -> Step:
            step = take(self.method.passes_for(model, inputs[0], objective))
            if self._max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_grad_norm, foreach=True)
            optimizer.step()
            return step

        optimizer.zero_grad()
        prepare_objective(objective, model)
        step = self._take(model, (batch, None), objective, run, ("step",))
        optimizer.zero_grad()
        return step

    # -- ordinary, recorded or replayed --------------------------------------------------------------------------

    def _take(self, model: nn.Module, inputs: Any, objective: ObjectiveLike, run: Run, kind: Hashable) -> Step:
        device = next(model.parameters()).device
        if device.type not in HAS_GRAPHS:
            self.report.ordinary += 1
            return run(inputs, self.method.run_step)
        try:
            about = self._key(model, inputs, objective, kind, device)
            state = model_key(model)
            key = (*about, state)
            entry = self._seen.get(key)
            if entry is None:
                step = self._observe(key, model, inputs, run, device)
            else:
                self._seen.move_to_end(key)
                if isinstance(entry, str):
                    raise NotCapturableError(entry)
                if isinstance(entry, Observed):
                    entry = self._record(key, model, inputs, objective, run, entry, kind)
                step = self._replay(entry, inputs, model, objective, state)
        except NotCapturableError as obstacle:
            self._mention(str(obstacle))
            self.report.ordinary += 1
            return run(inputs, self.method.run_step)
        return step

    def _key(
        self, model: nn.Module, inputs: Any, objective: Any, kind: Hashable, device: torch.device
    ) -> tuple[Hashable, ...]:
        if not self.method.capturable:
            raise NotCapturableError(f"{type(self.method).__name__} does not run the same operations in every step")
        declared = {name for name in self.method.state if name.split(".")[0] in self.method.buffers}
        if (why := _may_keep(self.method, declared)) is not None:
            raise NotCapturableError(why)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise NotCapturableError("DistributedDataParallel communicates outside the graph")
        if sharded_modules(model):
            raise NotCapturableError(
                "fully_shard gathers the parameters outside the graph; call the method itself, without Captured"
            )
        own = with_weights(objective, model)
        if own is not None:  # a recording writes the gradients of the model only
            raise NotCapturableError(
                f"objective={type(own).__name__} has trainable weights; make them a part of the model, or freeze them "
                "(requires_grad_(False))"
            )
        method = (method_key(self.method), self.method.capture_key(), self.method.buffer_key())
        return (kind, *method, objective_key(objective), batch_key(inputs), surroundings_key(device))

    def _observe(self, key: Hashable, model: nn.Module, inputs: Any, run: Run, device: torch.device) -> Step:
        """The first batch of a shape: an ordinary step, observed."""
        needs, constants = Needs(device), HostConstants(model, inputs)
        object.__setattr__(self.method, "steps_read", False)
        with observed(needs), constants.kept():
            step = run(inputs, self.method.run_step)
        needs.finish()
        kept = _may_keep(self.method, self.method.managed)
        if kept is not None and self.method.buffers:  # replaced by hand, they make every key new: none is met again
            self._mention(kept)
        obstacle = needs.obstacle or kept or _may_count(self.method)
        self._seen[key] = Observed(needs, constants) if obstacle is None else obstacle
        while len(self._seen) > self._max_graphs:
            self._seen.popitem(last=False)
            self.report.evicted += 1
            if self.report.evicted >= self._max_graphs and self.report.evicted > self.report.replayed:
                self._mention(_TOO_MANY.format(self._max_graphs))
        self.report.ordinary += 1
        return step

    def _record(
        self,
        key: Hashable,
        model: nn.Module,
        inputs: Any,
        objective: ObjectiveLike,
        run: Run,
        found: Observed,
        kind: Hashable,
    ) -> RecordedStep:
        self._pool = self._pool or Pool()
        place = None if kind == ("step",) else self._places(model)
        try:
            # Not run_step: a recording is not counted as a step, and an error in it is an obstacle.
            device = found.needs.device
            numbers = Numbers(device, self.method.step_radius())
            shares = _counted_on_the_host(objective, model, inputs[0])
            counted = HostShares(device, shares)
            with numbers.open(), counted.open():
                entry = RecordedStep(
                    lambda x: run(x, self.method.compute_step), model, inputs, found, self._pool, place
                )
            entry.numbers, entry.shares = numbers, None if shares is None else counted
        except NotCapturableError as obstacle:
            self._seen[key] = str(obstacle)
            self._pool = None  # a failed recording keeps its pool
            raise
        self._seen[key] = entry
        self.report.recorded += 1
        return entry

    def _replay(
        self, entry: RecordedStep, inputs: Any, model: nn.Module, objective: ObjectiveLike, state: Hashable
    ) -> Step:
        params = self._parameters(model, state)
        places = self._gradients.get(model, {})
        placed = {name: places[name] for name in entry.placed}
        # Gradients of earlier micro-batches may be in the memory that the graph writes to.
        earlier = {name: place.clone() for name, place in placed.items() if params[name].grad is place}
        if entry.numbers is not None:
            entry.numbers.set(self.method.step_radius())
        if entry.shares is not None:
            entry.shares.set(_counted_on_the_host(objective, model, inputs[0]) or [])
        step = entry.replay(inputs, self.method.steps)
        for name, place in placed.items():
            grad = params[name].grad
            if name in earlier:
                place.add_(earlier[name])
            else:
                params[name].grad = place if grad is None else grad.add_(place)
        self.report.replayed += 1
        return self.method.count_step(step)

    def _parameters(self, model: nn.Module, state: Hashable) -> dict[str, nn.Parameter]:
        """The parameters by name, cached: collecting the names takes a good part of the time of a small step."""
        known = self._named.get(model)
        if known is None or known[0] != state:
            known = self._named[model] = (state, dict(model.named_parameters()))
        return known[1]

    def _places(self, model: nn.Module) -> dict[str, Tensor]:
        """Memory for the gradients of this model; an unfrozen or replaced parameter gets new memory."""
        places = self._gradients.setdefault(model, {})
        for name, p in model.named_parameters():
            here = places.get(name)
            if p.requires_grad and (
                here is None or (here.shape, here.dtype, here.device) != (p.shape, p.dtype, p.device)
            ):
                places[name] = torch.zeros_like(p)
        return places

    def _mention(self, obstacle: str) -> None:
        if obstacle not in self.report.obstacles:
            warnings.warn(f"this step is not captured and runs as an ordinary one: {obstacle}", stacklevel=4)
        self.report.obstacles[obstacle] = self.report.obstacles.get(obstacle, 0) + 1


def _counted_on_the_host(objective: Any, model: nn.Module, batch: Any) -> list[float] | None:
    """The shares of micro-batches that an objective counts on the host; None if there are none."""
    if not isinstance(batch, MicroBatches) or not hasattr(objective, "items"):
        return None
    return host_shares(objective, prepared(objective, model, batch))


def _may_keep(method: Method, buffers: AbstractSet[str]) -> str | None:
    """The obstacle if state of a method, other than buffers, may be in other memory in the next step."""
    names = sorted(method.state.keys() - {"steps", "skipped", "progress"} - buffers)
    if not names or "capturable" in vars(type(method)):
        return None
    return (
        f"{type(method).__name__} keeps {names} in its state, and a replay uses the memory that was recorded. Keep "
        "them with self.buffer(), or set capturable = True in the class if it changes these tensors in place and runs "
        "the same operations in every step, else capturable = False"
    )


def _may_count(method: Method) -> str | None:
    """The obstacle if the observed step may depend on its number, and the class does not override capture_key()."""
    kind = type(method)
    if not method.steps_read or "capturable" in vars(kind) or kind.capture_key is not Method.capture_key:
        return None
    return (
        f"{kind.__name__} reads self.steps, and a replay repeats the step that was recorded. Override capture_key() "
        "to return what depends on the number; or set capturable = True in the class if nothing does, else "
        "capturable = False"
    )


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for number, group in enumerate(optimizer.param_groups):
        if "capturable" in group and not group["capturable"]:
            raise ValueError(f"param_groups[{number}] of {type(optimizer).__name__}: pass capturable=True to it")
        if not isinstance(group["lr"], Tensor):
            first = (*group["params"], *every)[0]  # a group may be empty
            group["lr"] = torch.tensor(float(group["lr"]), device=first.device)
