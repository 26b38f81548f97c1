"""What every method is: a frozen record of its hyperparameters whose ``backward`` replaces ``loss.backward()``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import torch
from torch import Tensor, nn

from deltasam.methods._frozen import explain_assignments
from deltasam.methods._keywords import KeywordsOnly, explain_missing_arguments
from deltasam.methods._other_words import check_state
from deltasam.parallel.ranks import Scope
from deltasam.step.checks import check_number as check_number
from deltasam.step.checks import check_scale, is_out_of_memory, shown, uses_a_graph_twice
from deltasam.step.passes import Ascent, ObjectiveLike, Passes, Scaler, prepare_objective
from deltasam.step.randomness import Randomness, Seed
from deltasam.step.selection import Preset, Selection

Self = TypeVar("Self", bound="Method")


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    r"""What happened in one step. Tensors are detached and on the model's device: nothing here waits for a GPU.

    Attributes:
        losses: :math:`l_i(w)`, shape (N,).
        forwards: Forward passes made; those that only compare something, or break off, are not counted.
        backwards: Backward passes made, counted likewise.
        perturbed_losses: :math:`l_i(w + \epsilon)`, shape (N,), or None if nothing was perturbed.
        weights: g, shape (N,), if the method weights the instances.
        grad_norm: The norm of the gradient that was followed uphill, without the loss scale.
        skipped: Whether the perturbation was left out because that gradient was zero or not finite; the step is then
            the plain gradient.
        arrived: Inside :func:`deltasam.measured_arrival`: the share of the perturbation that arrived where the weights
            are used, which may be in lower precision than they are stored in.

    Example:
        >>> from deltasam import SAM
        >>> model, objective = nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SAM(rho=0.05).backward(model, torch.ones(4, 2), objective)
        >>> sorted(step.metrics())
        ['grad_norm', 'loss', 'sharpness', 'skipped']
        >>> step.why_skipped is None
        True
    """

    losses: Tensor
    forwards: int
    backwards: int
    perturbed_losses: Tensor | None = None
    weights: Tensor | None = None
    grad_norm: Tensor | None = None
    skipped: Tensor | None = None
    arrived: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The objective of the batch at w: the mean of the losses."""
        return self.losses.mean()

    @property
    def sharpness(self) -> Tensor:
        """How much the perturbation raised the mean loss: R_batch, or R_inst, as far as the method measures it."""
        if self.perturbed_losses is None:
            return torch.zeros_like(self.losses[0])
        return self.perturbed_losses.mean() - self.losses.mean()

    @property
    def why_skipped(self) -> str | None:
        """None if the perturbation took place, else the reason in words. Waits for the device."""
        if self.skipped is None or not bool(self.skipped):
            return None
        norm = float("nan") if self.grad_norm is None else float(self.grad_norm)
        what = f"zero or too small to divide by ({norm:g})" if abs(norm) < 1 else f"not finite ({norm:g})"
        return f"the norm of the perturbation gradient was {what}; the step took the plain gradient"

    def metrics(self) -> dict[str, float]:
        """The step in numbers for a log. Waits for the device."""
        values: dict[str, Any] = {"loss": self.loss, "sharpness": self.sharpness, "grad_norm": self.grad_norm}
        if self.weights is not None:
            values |= {"weights_mean": self.weights.mean(), "weights_max": self.weights.max()}
            values["weights_std"] = self.weights.std(unbiased=False)
        values |= {"skipped": self.skipped, "arrived": self.arrived}
        return {name: float(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to take the gradient of a batch. The method is its own configuration and never touches the optimizer.

    Attributes:
        params: Which parameters are perturbed: a preset or a predicate, see :func:`deltasam.select`.
        randomness: ``"shared"``: all passes of a step see the same dropout masks; ``"independent"``: each its own.
        scope: With several processes: ``"local"``: each perturbs by its own batch, nothing is communicated in the
            first pass (m-sharpness, the original SAM's choice); ``"global"``: one perturbation for the batches of
            all, as in one process with the large batch, at the price of one more exchange of gradients. Where
            the parameters are sharded (FSDP2), ``"local"`` gathers all of them for the length of the step (gradients
            and optimizer stay sharded), and ``"global"`` never holds more than FSDP does. It says nothing about
            methods that perturb instances or embeddings, whose perturbations are each instance's own.
        state: What the method remembers between steps (nothing, for most); part of :meth:`state_dict`.

    Example:
        One of your own is a frozen dataclass with a ``_step``, in the verbs of :class:`~deltasam.step.passes.Passes`:

        >>> from deltasam.methods import Method, make_step
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Downhill(Method):
        ...     rho: float = 0.05
        ...     def _step(self, passes):
        ...         losses, grads = passes.gradient()
        ...         with passes.ascend(grads, -self.rho) as ascent:
        ...             perturbed = passes.accumulate()
        ...         return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
        >>> model, objective = nn.Linear(2, 1), lambda model, x: (model(x).squeeze(-1) - 9) ** 2
        >>> step = Downhill(rho=0.01).backward(model, torch.ones(4, 2), objective)
        >>> bool(step.sharpness < 0), step.forwards, step.backwards
        (True, 2, 2)
        >>> Downhill(rho=0).backward(model, torch.ones(4, 2), objective).forwards  # plain training
        1
    """

    params: Selection = "all"
    randomness: Randomness = "shared"
    scope: Scope = "local"
    state: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    #: Forward and backward passes of a step, as the docs list them.
    cost: ClassVar[str] = "1/1"
    #: Whether every step (of a phase) is the same operations on the same memory, so that a CUDA graph can replay it.
    #: A class that does not set it itself is captured unless it keeps something in :attr:`state`, or reads
    #: :attr:`steps` in a step without a :meth:`capture_key` that says what follows from it.
    capturable: ClassVar[bool] = True
    _steps_read: ClassVar[bool] = False  # since Captured set it to False, of an instance
    #: The names in :attr:`state`, besides the two counts. Any name is taken where a class does not say it itself.
    state_keys: ClassVar[frozenset[str]] = frozenset()

    if not TYPE_CHECKING:  # who checks types goes by the __init__ of each class
        __new__ = KeywordsOnly()

    def __post_init__(self) -> None:
        """Checks the hyperparameters: every one of them, here, with the name, the value and the way out."""
        explain_assignments(type(self))
        if not callable(self.params) and self.params not in get_args(Preset):
            presets = ", ".join(map(repr, get_args(Preset)))
            raise ValueError(
                f"params={shown(self.params)} must be one of {presets}, or a predicate (name, parameter) -> bool"
            )
        if self.randomness not in ("shared", "independent"):
            raise ValueError(f"randomness={self.randomness!r} must be 'shared' or 'independent'")
        if self.scope not in ("local", "global"):
            raise ValueError(
                f"scope={self.scope!r} must be 'local' (each process perturbs by its own batch) or 'global' "
                "(one perturbation for the batches of all)"
            )

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
        """The passes of one step over this batch, set up but not made."""
        check_scale(scale)
        return Passes(
            model,
            batch,
            objective,
            params=self.params,
            scale=scale,
            randomness=self.randomness,
            scope=self.scope,
            replay=not self.is_erm(),
            gather=self._needs_whole() and not self.is_erm(),
            seed=self.step_seed,
        )

    def run_step(self, passes: Passes) -> Step:
        """One step over passes that are set up already: :meth:`backward`'s own, or an adapter's."""
        graph = torch.is_grad_enabled()
        try:
            return self.count_step(self._run(passes))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(self._advice(error, passes.count.forwards)) from error
            if uses_a_graph_twice(error):
                raise RuntimeError(
                    "the objective must only compute the losses, anew in every pass: no backward() in it, and nothing "
                    f"of an earlier pass kept by it or the model ({str(error).splitlines()[0]})"
                ) from error
            raise
        except BaseException as stop:
            if not isinstance(stop, Exception):
                # Ctrl-C while a context is entered or left: its frame would keep the weights moved until it is gone,
                # and torch's own would leave the mode.
                clear_frames(stop.__traceback__)
                torch.set_grad_enabled(graph)
            raise
        finally:
            passes.ranks.release()

    def _advice(self, error: RuntimeError, number: int) -> str:
        return (
            f"{error}\n{type(self).__name__} ran out of memory in pass {number} of a step; the weights are as they "
            "were. Lower the batch size, or pass deltasam.MicroBatches (one perturbation, activations of one part), "
            "or perturb fewer parameters (params='norms', 'no-embeddings', 'lora')"
        )

    def count_step(self, step: Step) -> Step:
        """Counts the step, and whether it left the perturbation out.

        Raises:
            TypeError: It is no step.
        """
        if not isinstance(step, Step):
            raise TypeError(
                f"{type(self).__name__}._step returned {shown(step)}, not a Step, the record of what happened: end it "
                "with `return make_step(passes, losses)` (from deltasam.methods import make_step)"
            )
        self.state["steps"] = self._count + 1
        if step.skipped is not None:
            self.state["skipped"] = self.state.get("skipped", 0) + step.skipped.int()
        return step

    def _run(self, passes: Passes) -> Step:
        return plain_step(passes) if self.is_erm() else self._step(passes)

    @abstractmethod
    def _step(self, passes: Passes) -> Step:
        """The method itself, in the verbs of :class:`~deltasam.step.passes.Passes`. Not called where :meth:`is_erm`."""

    def is_erm(self) -> bool:
        """Whether this step is plain training, which the base class then does: here, with ``rho = 0``.

        Override it where something else decides, or where a step with ``rho = 0`` is not plain training.
        """
        return getattr(self, "rho", None) == 0

    def _needs_whole(self) -> bool:
        """Whether a process needs all of every parameter: its own perturbation is not in others' shards."""
        return self.scope == "local"

    def supports_micro_batches(self) -> bool:
        """Whether a step over :class:`~deltasam.MicroBatches` is the step over the batch that they make up."""
        return True

    def capture_key(self) -> Hashable:
        """Which kind of step comes next, for methods whose steps are not all alike."""
        return None

    @property
    def steps(self) -> int:
        """How many steps this method has taken (restored by :meth:`load_state_dict`)."""
        object.__setattr__(self, "_steps_read", True)
        return self._count

    @property
    def step_seed(self) -> Seed:
        """Where the random numbers of the next step come from: its ``seed``, 0 by default, and the step's number.

        A captured step puts in the number of the step that is replayed.
        """
        return Seed(getattr(self, "seed", 0), self._count)

    @property
    def _count(self) -> int:
        return int(self.state.get("steps", 0))

    @property
    def skipped(self) -> int:
        """How many steps left the perturbation out. Waits for the device."""
        return int(self.state.get("skipped", 0))

    def check_remembered(self, name: str, kept: Tensor, shape: Sequence[int]) -> None:
        """Raises a ValueError where what the method remembers under a name is not of the shape that this model has."""
        if tuple(kept.shape) != tuple(shape):
            raise ValueError(
                f"{type(self).__name__} remembers {name!r} of shape {tuple(kept.shape)}, where this model has "
                f"{tuple(shape)}: what it remembers is of another model, or of this one before it changed. Make a "
                "method for each, or start it afresh, method.load_state_dict({})"
            )

    def replace(self: Self, **changes: Any) -> Self:
        """The same method with other hyperparameters and the *same* state: ``method.replace(rho=schedule(t))``."""
        other = type(self)(**{f.name: getattr(self, f.name) for f in fields(self) if f.init} | changes)
        object.__setattr__(other, "state", self.state)
        return other

    def state_dict(self) -> dict[str, Any]:
        """What to put into a checkpoint: numbers and tensors only. Without it a resumed run is still valid."""
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self.state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave; then a resumed run continues exactly.

        Raises:
            TypeError: The state is no mapping.
            ValueError: It is an optimizer's, or another method's.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state={shown(state)} must be what state_dict() gave, a mapping")
        if "param_groups" in state:
            raise ValueError("state is that of an optimizer (it has param_groups): give what method.state_dict() gave")
        if "state_keys" in vars(type(self)):
            check_state(type(self).__name__, state, ("steps", "skipped", *self.state_keys))
        self.state.clear()
        self.state.update(state)


def plain_step(passes: Passes) -> Step:
    """Plain training: one forward, one backward, nothing else."""
    return make_step(passes, passes.accumulate(keep_side_effects=True))


def make_step(
    passes: Passes,
    losses: Tensor,
    *,
    perturbed: Tensor | None = None,
    ascent: Ascent | None = None,
    weights: Tensor | None = None,
) -> Step:
    """The record of a finished step."""
    return Step(
        losses=losses,
        forwards=passes.count.forwards,
        backwards=passes.count.backwards,
        perturbed_losses=perturbed,
        weights=weights,
        grad_norm=None if ascent is None else ascent.norm,
        skipped=None if ascent is None else ascent.skipped,
        arrived=None if ascent is None else ascent.arrived,
    )
