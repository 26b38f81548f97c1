"""The base of every method: a frozen record of hyperparameters whose ``backward`` replaces ``loss.backward()``."""

from __future__ import annotations

import dataclasses
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from deltasam.methods._buffers import Buffer, addresses, copied, fitted, require_outside_recording
from deltasam.methods._fields import check_fields, choice
from deltasam.methods._hints import KeywordsOnly, explain_assignment, explain_missing_arguments
from deltasam.methods._names_used import names_in
from deltasam.methods._step import Step, plain_step
from deltasam.parallel.ranks import Scope
from deltasam.parallel.shards import is_shard
from deltasam.step.branches import is_recorded
from deltasam.step.checks import check_scale, is_out_of_memory, shown, uses_a_graph_twice
from deltasam.step.passes import ObjectiveLike, Passes, Scaler, prepare_objective
from deltasam.step.quantized import require_ordinary
from deltasam.step.radius import Fixed, Progress, Radius, as_radius, on_device
from deltasam.step.randomness import Randomness, Seed
from deltasam.step.selection import Preset, Selection

Self = TypeVar("Self", bound="Method")

_COUNTS = ("steps", "skipped", "progress")  # in the state of every method
_FORMER = {  # names until 0.1 of what a user's class may define, and the names since
    "passes": "cost",
    "remembers": "buffers",
    "is_plain": "is_erm",
    "divisible": "supports_micro_batches",
    "phase": "capture_key",
}


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to take the gradient of a batch. The method is its own configuration and never touches the optimizer.

    The fields are the configuration. They are frozen: ``method.replace(rho=0.1)`` makes another method. What a method
    keeps between steps is in one attribute, :attr:`state`. ``replace`` passes the same state to the new method;
    ``method.replace(state={})`` starts afresh.

    Attributes:
        params: Which parameters are perturbed: a preset (``"trained"``, ``"base"``, ``"adapters"``, ``"all"``, ...)
            or a predicate, see :func:`deltasam.select`. They need not be trained. Methods that follow the gradient of
            the batch compute one for frozen weights too, as large as the weights; :class:`~deltasam.PerInstanceSAM`
            needs none.
        randomness: ``"shared"``: all passes of a step see the same dropout masks; ``"independent"``: each draws its
            own.
        scope: With several processes: ``"local"``: each process perturbs by its own batch, and the first pass
            communicates nothing (m-sharpness, the original SAM's choice); ``"global"``: one perturbation for the
            batches of all processes, as in one process with the large batch, at the price of one more exchange of
            gradients. Where the parameters are sharded (FSDP2), ``"local"`` gathers all of them for the duration of
            the step (gradients and optimizer stay sharded), and ``"global"`` never holds more than FSDP does. It has
            no effect on methods that perturb instances or embeddings, whose perturbations belong to single instances.
        state: What the method keeps between steps: two counts, and its buffers. Saved by :meth:`state_dict`.

    Example:
        Your own method is a frozen dataclass with a ``_step``, in the verbs of :class:`~deltasam.step.passes.Passes`:

        >>> from deltasam.methods import Method, Rho, make_step, radius
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Downhill(Method):
        ...     rho: Rho = radius(0.05)
        ...     def _step(self, passes):
        ...         losses, grads = passes.gradient()
        ...         with passes.ascend(grads, -self.radius) as ascent:
        ...             perturbed = passes.accumulate()
        ...         return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
        >>> model, objective = nn.Linear(2, 1), lambda model, x: (model(x).squeeze(-1) - 9) ** 2
        >>> step = Downhill(rho=0.01).backward(model, torch.ones(4, 2), objective)
        >>> bool(step.sharpness < 0), step.forwards, step.backwards
        (True, 2, 2)
        >>> Downhill(rho=0).backward(model, torch.ones(4, 2), objective).forwards  # plain training
        1
    """

    # Until 0.1 "trained" was called "all", which is in the ids of earlier runs.
    params: Selection = field(default="trained", metadata={"former": {"trained": "all"}})
    randomness: Randomness = choice("shared", Randomness)
    scope: Scope = choice("local", Scope)
    state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    #: Forward and backward passes of a step, as the docs list them.
    cost: ClassVar[str] = "2/2"
    #: The names of what the method keeps between steps through :meth:`buffer` or :meth:`table`.
    #: :meth:`load_state_dict` accepts these and the two counts.
    buffers: ClassVar[Sequence[str]] = ()
    #: Whether a CUDA graph can replay a step: every step (with the same :meth:`capture_key`) runs the same operations
    #: on the same memory. A class that does not set this is captured, unless it keeps something in :attr:`state` that
    #: is not in :attr:`buffers`, or reads :attr:`steps` without overriding :meth:`capture_key`.
    capturable: ClassVar[bool] = True
    #: What is perturbed; "layers": the outputs of layers, whose matrices may be quantized.
    perturbs: ClassVar[Literal["weights", "layers", "instances", "embeddings", "nothing"]] = "weights"
    #: Whether the method computes with the final gradient, in ``passes.fresh_grads()``.
    edits_gradient: ClassVar[bool] = False
    #: Whether the ascent uses the direction of the gradient only, so that clipping its norm changes nothing.
    uses_direction_only: ClassVar[bool] = False
    #: Whether the method, with its defaults, needs a model with adapters (LoRA).
    needs_adapters: ClassVar[bool] = False
    #: Whether the method takes some instances out of a batch.
    subsets_batch: ClassVar[bool] = False
    #: Whether the ascent follows a gradient at w, which radii in units of the loss need.
    follows_gradient: ClassVar[bool] = True
    #: Whether the ascent goes straight along that gradient, so that rho is a distance in the 2-norm.
    plain_ascent: ClassVar[bool] = True
    #: Whether the functions of the class use :attr:`radius` and never ``rho``: captured steps are then not recorded
    #: again for another rho. Found from their code.
    reads_radius: ClassVar[bool] = False
    #: Whether a step has read :attr:`steps` since this was set to False; :class:`~deltasam.Captured` looks at it.
    steps_read: ClassVar[bool] = False
    #: The buffers that this object has used.
    managed: ClassVar[frozenset[str]] = frozenset()
    _updated: ClassVar[Mapping[str, int]] = {}  # of this object: the number of the last step that updated a buffer

    if not TYPE_CHECKING:  # type checkers use the __init__ of each class
        __new__ = KeywordsOnly()

    def __init_subclass__(cls, **options: Any) -> None:
        """Accepts the former names of what a user's class may define, and sees how the class uses its radius."""
        super().__init_subclass__(**options)
        used = {name for each, value in vars(cls).items() if each != "__post_init__" for name in names_in(value)}
        if "rho" in used or "radius" in used:
            cls.reads_radius = "rho" not in used
        for former, name in _FORMER.items():
            if former in vars(cls):
                warnings.warn(
                    f"{cls.__name__}.{former} is now called {name}; the former name works until version 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                setattr(cls, name, vars(cls)[former])

    def __post_init__(self) -> None:
        """Checks the hyperparameters."""
        explain_assignment(type(self))
        if not callable(self.params) and self.params not in get_args(Preset):
            presets = ", ".join(map(repr, get_args(Preset)))
            raise ValueError(f"params={shown(self.params)} must be one of {presets}, or a predicate (name, p) -> bool")
        check_fields(self)
        rho = getattr(self, "rho", None)
        if isinstance(rho, Mapping):
            object.__setattr__(self, "rho", as_radius(rho))
        if isinstance(rho, (Mapping, Radius)) and as_radius(rho).needs_gradient and not self.follows_gradient:
            raise ValueError(
                f"rho={shown(rho)} is in units of the loss, which needs the gradient at w, and {type(self).__name__} "
                "does not compute that: use a number, or Relative(...)"
            )

    # -- one step ------------------------------------------------------------------------------------------------

    @explain_missing_arguments
    def backward(
        self, model: nn.Module, batch: Any, objective: ObjectiveLike, *, scale: float | Tensor | Scaler = 1.0
    ) -> Step:
        """Adds the method's gradient to ``.grad``, as ``loss.backward()`` would, and leaves the weights as they were.

        Args:
            model: The model, in the mode (usually train) it is to be used in.
            batch: Whatever the objective takes; or :class:`~deltasam.MicroBatches` for one perturbation over several.
            objective: ``objective(model, batch) -> (N,)``, the loss of every instance.
            scale: Factor on the loss: ``1 / steps`` when accumulating, or a ``torch.amp.GradScaler``.

        Returns:
            What happened, as detached tensors.
        """
        prepare_objective(objective, model)
        return self.run_step(self.passes_for(model, batch, objective, scale=scale))

    def passes_for(
        self, model: nn.Module, batch: Any, objective: ObjectiveLike, *, scale: float | Tensor | Scaler = 1.0
    ) -> Passes:
        """Sets up the passes of one step over this batch. None of them is run."""
        check_scale(scale)
        is_erm = self.is_erm()
        return Passes(
            model,
            batch,
            objective,
            params=self.params,
            scale=scale,
            randomness=self.randomness,
            scope=self.scope,
            replay=not is_erm,
            gather=self._needs_whole() and not is_erm,
            seed=self.step_seed,
        )

    def run_step(self, passes: Passes) -> Step:
        """Runs and counts one step over passes that :meth:`passes_for`, or an adapter, has set up."""
        graph = torch.is_grad_enabled()
        try:
            return self.count_step(self.compute_step(passes))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(
                    f"{error}\n{type(self).__name__} ran out of memory in pass {passes.count.forwards} of a step. The "
                    "weights are unchanged. Lower the batch size, pass deltasam.MicroBatches (one perturbation, "
                    "activations of one part), or perturb fewer parameters (params='norms', 'adapters')"
                ) from error
            if uses_a_graph_twice(error):
                raise RuntimeError(
                    "the objective must only compute the losses, anew in every pass: it must not call backward(), nor "
                    "keep results of an earlier pass, nor may the model. A derivative that is a part of the losses (a "
                    "gradient penalty) has to be computed under torch.enable_grad(), because some passes are run "
                    f"without gradients ({str(error).splitlines()[0]})"
                ) from error
            raise
        except BaseException as stop:
            if not isinstance(stop, Exception):
                # Ctrl-C while a context is entered or left: its frame would keep the weights moved, and torch's
                # would leave gradients disabled.
                clear_frames(stop.__traceback__)
                torch.set_grad_enabled(graph)
            raise
        finally:
            passes.ranks.release()

    def count_step(self, step: Step) -> Step:
        """Counts the step, and whether its perturbation was skipped.

        Raises:
            TypeError: ``_step`` did not return a :class:`Step`.
        """
        if not isinstance(step, Step):
            raise TypeError(
                f"{type(self).__name__}._step returned {shown(step)}, not a Step: end it with "
                "`return make_step(passes, losses)` (from deltasam.methods import make_step)"
            )
        self.state["steps"] = self._count + 1
        if (skipped := step.skipped) is not None:
            before = self.state.get("skipped")  # a tensor of integers, to which a boolean can be added
            if not isinstance(before, Tensor):
                self.state["skipped"] = (before or 0) + skipped.int()
            elif not (skipped.is_cpu and not skipped):  # most often nothing is to be added
                self.state["skipped"] = before + skipped
        return step

    def compute_step(self, passes: Passes) -> Step:
        """Runs one step without counting it."""
        if self.is_erm():
            return plain_step(passes)
        if self.perturbs == "weights":
            require_ordinary(passes.params.values(), passes.params)
        return self._step(passes)

    @abstractmethod
    def _step(self, passes: Passes) -> Step:
        """The method itself, in the verbs of :class:`~deltasam.step.passes.Passes`. Not called if :meth:`is_erm`."""

    # -- what kind of step it is -----------------------------------------------------------------------------------

    def is_erm(self) -> bool:
        """Whether this step is plain training, which the base class does: by default, with ``rho = 0``."""
        rho = getattr(self, "rho", None)
        if isinstance(rho, float):
            return rho == 0
        return rho is not None and self.step_radius().is_zero()

    def _needs_whole(self) -> bool:
        """Whether each process needs whole parameters, because the shards of others lack its perturbation."""
        if self.perturbs == "weights":  # whole parameters do not help to edit the final gradient, which is sharded
            return self.scope == "local" and not self.edits_gradient
        return self.perturbs == "instances"

    def supports_micro_batches(self) -> bool:
        """Whether a step over :class:`~deltasam.MicroBatches` equals the step over the batch that they make up."""
        return not self.subsets_batch or self.is_erm()

    def capture_key(self) -> Hashable:
        """Which kind of step comes next, for methods whose steps differ. Each kind gets its own CUDA graph."""
        return None

    # -- the radius ------------------------------------------------------------------------------------------------

    @property
    def radius(self) -> Radius:
        """The radius of this step, for ``passes.ascend``: rho, with its schedule applied.

        While a step is recorded its numbers are in the memory of the device, so that a replay reads those of its own
        step. A method that uses :attr:`rho` instead is recorded again for every value.
        """
        return on_device(self.step_radius())

    def step_radius(self) -> Radius:
        """The radius of the next step, with numbers of Python."""
        rho = getattr(self, "rho", 0.0)
        return as_radius(rho).at(self._progress()) if isinstance(rho, Radius) else Fixed(rho)

    def set_progress(
        self,
        *,
        step: int | None = None,
        total: int | None = None,
        epoch: float | None = None,
        lr: float | None = None,
    ) -> None:
        """Says where the training is, for a :class:`~deltasam.Scheduled` radius. The Trainers of this package do it.

        Args:
            step: Number of the step; by default the steps of this method are counted.
            total: Number of steps of the training.
            epoch: Passes over the data so far, with a fraction.
            lr: The learning rate relative to its peak.
        """
        given = {"step": step, "total": total, "epoch": epoch, "lr": lr}
        self.state["progress"] = {name: value for name, value in given.items() if value is not None}

    def _progress(self) -> Progress:
        return Progress(**{"step": self._count, **self.state.get("progress", {})})

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many steps this method has taken (restored by :meth:`load_state_dict`)."""
        object.__setattr__(self, "steps_read", True)
        return self._count

    @property
    def step_seed(self) -> Seed:
        """The seed of the next step: the ``seed`` of the method (0 by default) and the number of the step."""
        return Seed(getattr(self, "seed", 0), self._count)

    @property
    def _count(self) -> int:
        return int(self.state.get("steps", 0))

    @property
    def skipped(self) -> int:
        """How many steps skipped the perturbation. Synchronises with the device."""
        return int(self.state.get("skipped", 0))

    def buffer(self, name: str, passes: Passes, params: Mapping[str, nn.Parameter] | None = None) -> Buffer:
        """Tensors that are kept between steps, one per parameter; zeros at first.

        They do not depend on the loss scale, ignore a step with inf or nan, are sharded as the parameters are, move
        with them to another device or dtype, can be captured, and are part of :meth:`state_dict`. See
        :class:`~deltasam.methods.Buffer`.

        Args:
            name: One of :attr:`buffers`.
            passes: The passes of the step.
            params: The parameters; those chosen for perturbation by default.

        Raises:
            ValueError: The class does not declare the name, or the buffer belongs to another model.
        """
        self._claim(name)
        params = passes.params if params is None else params
        kept = self.kept(name, params) or {}
        self.state[name] = kept
        for each, p in params.items():
            if each not in kept:
                kept[each] = fitted(None, p)

        def on_update() -> bool:
            is_repeated = self._updated.get(name) == self._count and name not in passes.updated
            passes.updated.add(name)
            if not is_repeated and not is_recorded(passes.device):
                object.__setattr__(self, "_updated", {**self._updated, name: self._count})
            return not is_repeated

        return Buffer([kept[each] for each in params], list(params.values()), passes, on_update)

    def kept(
        self, name: str, params: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor] | None:
        """The tensors in the state under a name, with the parameters' devices and layout; None if there are none.

        Args:
            name: A name in :attr:`state`, with one tensor per parameter. Parameters may be missing.
            params: The parameters by name.
            dtype: The dtype of the tensors; the parameters' by default.

        Raises:
            ValueError: A tensor belongs to another model, or to the shard of another process.
        """
        found: dict[str, Tensor] | None = self.state.get(name)
        if found is None:
            return None
        for each, p in params.items():
            if each in found:
                if not is_shard(p) and not is_shard(found[each]):
                    self.check_remembered(each, found[each], p.shape)
                found[each] = fitted(found[each], p, dtype)
        return found

    def table(
        self,
        name: str,
        shape: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        start: Callable[[Tensor], Any] = Tensor.zero_,
    ) -> Tensor:
        """One tensor that is kept between steps, to be changed in place.

        Args:
            name: One of :attr:`buffers`; a dot and anything else may follow.
            shape: Its shape.
            device: Its device.
            dtype: Its dtype, if it is new.
            start: Fills it, if it is new.

        Raises:
            ValueError: The class does not declare the name, or the table has another shape.
        """
        self._claim(name)
        kept: Tensor | None = self.state.get(name)
        if kept is None:
            require_outside_recording(device)
            kept = self.state[name] = torch.empty(tuple(shape), dtype=dtype, device=device)
            start(kept)
        elif kept.device != device:
            require_outside_recording(device)
            kept = self.state[name] = kept.to(device)
        self.check_remembered(name, kept, shape)
        return kept

    def claim_buffers(self) -> None:
        """Says that this class itself keeps all of :attr:`buffers` in fixed memory, as :meth:`buffer` does."""
        for name in self.buffers:
            self._claim(name)

    def _claim(self, name: str) -> None:
        if name.split(".")[0] not in self.buffers:
            raise ValueError(
                f"{type(self).__name__} does not declare the buffer {name!r}: write buffers = ({name!r},) in the class"
            )
        if name not in self.managed:
            object.__setattr__(self, "managed", self.managed | {name})

    def buffer_key(self) -> tuple[tuple[str, Hashable], ...]:
        """Where the buffers are in memory. A captured step can replay until they move."""
        kept = {name: value for name, value in self.state.items() if name.split(".")[0] in self.buffers}
        return tuple((name, addresses(value)) for name, value in kept.items())

    def check_remembered(self, name: str, kept: Tensor, shape: Sequence[int]) -> None:
        """Raises a ValueError if a kept tensor does not have the shape that this model needs."""
        if tuple(kept.shape) != tuple(shape):
            raise ValueError(
                f"{type(self).__name__} keeps {name!r} with shape {tuple(kept.shape)}, but this model has "
                f"{tuple(shape)}: the state belongs to another model, or the model has changed. Make one method per "
                "model, or start afresh with method.load_state_dict({})"
            )

    def replace(self: Self, **changes: Any) -> Self:
        """The same method with other hyperparameters and the *same* state: ``method.replace(rho=schedule(t))``."""
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: numbers and copies of tensors."""
        return {name: copied(value) for name, value in self.state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, so that a resumed run continues exactly.

        Raises:
            TypeError: The state is not a mapping.
            ValueError: It belongs to an optimizer or to another method.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state={shown(state)} must be what state_dict() returned, a mapping")
        if "param_groups" in state:
            raise ValueError("state belongs to an optimizer (param_groups): pass what method.state_dict() returned")
        # A user's class may write to `state` directly; the methods of this package use buffers only.
        if "buffers" in vars(type(self)) or type(self).__module__.startswith("deltasam."):
            unknown = [name for name in state if str(name).split(".")[0] not in (*_COUNTS, *self.buffers)]
            if unknown:
                kind = type(self).__name__
                raise ValueError(
                    f"state has {unknown[0]!r}, which {kind} does not keep: pass what state_dict() of a {kind} "
                    "returned, or {} to start afresh"
                )
        restored = {name: copied(value) for name, value in state.items()}
        self.state.clear()
        self.state.update(restored)
        object.__setattr__(self, "_updated", {})
