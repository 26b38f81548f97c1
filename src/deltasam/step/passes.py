"""The passes of one step over the model, the batch and the objective, all with the same randomness.

A method is written in four verbs: ``losses`` (no gradient), ``gradient`` (of the weighted losses, for the ascent),
``ascend`` (to w + eps and back), ``accumulate`` (``backward`` into ``.grad``). The verbs handle micro-batches, loss
scaling, autocast, random streams and buffers, count the passes and check the losses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deltasam.parallel.ranks import Scope
from deltasam.parallel.refusals import require_whole
from deltasam.step.batches import one_more, part_of_a_step, versions
from deltasam.step.branches import Branches
from deltasam.step.checks import check_losses, check_move, check_step, require_real, warn_if_changed
from deltasam.step.cotangents import Cotangents
from deltasam.step.fused.noise import Noise
from deltasam.step.gradients import Scaler as Scaler
from deltasam.step.gradients import gradient, scaled, set_aside, without_steps
from deltasam.step.moving import Moved, perturbed
from deltasam.step.norms import dense, global_norm, masked_product, tensor_norms
from deltasam.step.precision import arrived, grids_of, is_measured, no_autocast, note_grids
from deltasam.step.quantized import require_ordinary
from deltasam.step.radius import Climb, Radius, as_radius, sizes_of
from deltasam.step.randomness import Randomness, Seed
from deltasam.step.selection import Selection, differentiable, select
from deltasam.step.step_batch import ObjectiveLike as ObjectiveLike
from deltasam.step.step_batch import StepBatch
from deltasam.step.unperturbed import unperturbed_part, unperturbed_without

if TYPE_CHECKING:
    from typing_extensions import Self

_is_meta = operator.attrgetter("is_meta")
_ROUNDING = 2**32  # separates the seeds of the rounding from those of random directions


def prepare_objective(objective: ObjectiveLike, model: nn.Module) -> None:
    """Checks both, and calls ``objective.prepare(model)``, if it exists; once per step, with the model at w."""
    check_step(model, objective)
    prepare = getattr(objective, "prepare", None)
    if prepare is not None:
        prepare(model)


@dataclass
class Count:
    """How many passes a step has made so far.

    A sweep over micro-batches is one pass. Methods that finish one micro-batch before the next repeat their passes for
    each of them: ``forwards`` and ``backwards`` count all of these, ``repeated`` those after the first micro-batch.
    """

    forwards: int = 0
    backwards: int = 0
    repeated: tuple[int, int] = (0, 0)

    @property
    def sweeps(self) -> tuple[int, int]:
        """Forwards and backwards over the batch."""
        return self.forwards - self.repeated[0], self.backwards - self.repeated[1]


@dataclass(frozen=True)
class Ascent:
    """A move to w + eps.

    Attributes:
        norm: The norm of the gradient that the move follows, unscaled.
        skipped: Whether the move was skipped because there was no gradient to follow.
        arrived: The share of the move that arrived, if it was measured.
        radius: The norm of the move; of perturbations per instance their mean.
    """

    norm: Tensor
    skipped: Tensor
    arrived: Tensor | None = None
    radius: Tensor | None = None


@dataclass
class Followed:
    """The loss, as a mean over the batch, whose gradient was computed last; shared by the parts of a step."""

    loss: Tensor | None = None


class Passes(StepBatch):
    """The passes of one step of a method.

    Attributes:
        params: The parameters that may be perturbed, by name.
        scope: Whether the ascent follows the gradient of this process or of all.
        count: The passes made so far.
        followed: The loss that the last gradient belongs to.
        branches: Passes that run concurrently, in a recorded step.
        objective_kind: The objective of the whole step; parts of the step wrap it.

    Args:
        model: The model, in the mode (train or eval) that the passes use.
        batch: One batch, or :class:`~deltasam.MicroBatches`.
        objective: Maps (model, batch) to losses of shape (N,).
        params: Which parameters may be perturbed.
        scale: Factor on the loss, or a ``GradScaler``.
        randomness: Whether extra passes see the same random draws.
        scope: Whether the ascent follows the gradient of this process or of all, see :class:`~deltasam.Method`.
        replay: Remember the random streams and buffers for extra passes; a method with a single pass needs none.
        gather: Whether sharded parameters are gathered during the step.
        seed: The method's seed and the number of the step, for the rounding of perturbations.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        objective: ObjectiveLike,
        *,
        params: Selection = "trained",
        scale: float | Tensor | Scaler = 1.0,
        randomness: Randomness = "shared",
        scope: Scope = "local",
        replay: bool = True,
        gather: bool = False,
        seed: Seed = Seed(0, 0),  # noqa: B008 - a frozen record
    ) -> None:
        super().__init__(model, batch, objective, randomness=randomness, replay=replay, gather=gather)
        self.params = select(self.inner, params, self.trainable)
        self.objective_kind: Any = objective
        self.count = Count()
        self.followed = Followed()
        self.updated: set[str] = set()  # the buffers of the method that this step has updated
        #: The device of the step's scalars: that of the first parameter that may be perturbed.
        self.device: torch.device = next(
            chain(filterfalse(_is_meta, self.params.values()), self.trainable.values())
        ).device
        self.branches = Branches(self.device)
        self.scope, self._scale, self._seed = scope, scale, seed
        self._moved: Moved | None = None
        self._without: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def involved(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained or may be perturbed, by name."""
        return {**self.trainable, **self.params}

    # -- the four verbs ------------------------------------------------------------------------------------------

    def losses(self, *, keep_side_effects: bool = False, concurrent: bool = False) -> Tensor:
        """Losses of the instances without a graph, shape (N,). One forward.

        Args:
            keep_side_effects: Keep the random draws and the BatchNorm statistics of this pass. Each step keeps those
                of one pass, the one at w.
            concurrent: The losses are not read before ``branches.join()``, so that a recorded pass may run at the same
                time as the next ones.
        """
        self.count.forwards += 1
        place = self.branches.concurrent(p.data for p in self.inner.parameters()) if concurrent else nullcontext()
        with torch.no_grad(), place, self.one_pass(keep_side_effects):
            losses = self.evaluate().detach()
        self.ranks.reshard()
        return losses

    def losses_and_draws(self, *, keep_side_effects: bool = False) -> tuple[Tensor, bool]:
        """As :meth:`losses`, and whether random numbers were drawn for them, which all passes of the step repeat."""
        self.count.forwards += 1
        with torch.no_grad(), self.one_pass(keep_side_effects):
            losses = self.evaluate().detach()
            has_draws = self._replay is not None and self._replay.has_drawn()
        self.ranks.reshard()
        return losses, has_draws

    def gradient(
        self,
        weights: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        keep_side_effects: bool = True,
        params: Sequence[nn.Parameter] | None = None,
        cotangents: Cotangents | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses and the gradient of their weighted mean, without touching ``.grad``. One forward, one backward.

        Args:
            weights: g, shape (N,), or a function of the losses (N,) that returns g; uniform by default. With several
                micro-batches the function needs the losses of all instances first, which takes one more forward.
            keep_side_effects: As in :meth:`losses`.
            params: The parameters to differentiate with respect to; by default those that may be perturbed.
            cotangents: Keeps the derivatives by the outputs of the model, for :meth:`accumulate`. The objective must
                be an :class:`~deltasam.Objective`, which separates the outputs from the losses.

        A gradient of frozen parameters costs as much as that of trained ones: time, and one copy of them.

        Returns:
            The losses (N,), detached, and one gradient per parameter, None if it was not used. The gradients carry the
            loss scale. With ``scope="global"`` they are the mean over all processes.
        """
        self.ranks.check(self.scope, self.params)
        if callable(weights) and len(self.batches) > 1:
            weights = weights(self.losses())
        self.count.forwards += 1
        self.count.backwards += 1
        targets = list(self.params.values()) if params is None else list(params)
        require_ordinary(targets, self.params)
        require_real(targets, self.named)
        parts: list[Tensor] = []
        means: list[Tensor] = []
        record = None if cotangents is None else cotangents.record
        with (
            torch.enable_grad(),
            self.one_pass(keep_side_effects),
            self.ranks.shards_held(),
            nullcontext() if self.params is self.trainable else differentiable(self.params),
            gradient(targets, self.involved if self.ranks.sharded else None) as collected,
        ):
            for k in range(len(self.batches)):
                losses = self._evaluate(k, self.inner, graph=True, ascending=True, outputs=record)
                g = weights(losses.detach()) if callable(weights) else self._weights_of(k, weights)
                with no_autocast(losses.device):
                    mean = self._weighted_mean(losses, k, g)
                    collected.add(self.scaled(mean))
                    means.append(mean.detach())
                    del mean
                note_grids(self.inner, self.objective_kind, losses, targets, collected.total)
                parts.append(losses.detach())
                del losses
            grads = collected.total
        self.followed.loss = means[0] if len(means) == 1 else torch.stack(means).sum()
        if self.scope == "global" and self.ranks.replicated:
            grads = self.ranks.mean_gradients(grads, targets)
        self.ranks.reshard()
        return self.joined(parts), grads

    @contextmanager
    def ascend(
        self,
        direction: Sequence[Tensor | Noise | None],
        rho: float | Tensor | Radius,
        *,
        norm: Tensor | None = None,
        norms: Tensor | None = None,
        params: Sequence[nn.Parameter] | None = None,
        consume: bool = True,
    ) -> Iterator[Ascent]:
        r"""Moves to :math:`w + \rho \cdot direction / norm` (Eq. 1's one ascent step) and always back.

        Args:
            direction: One tensor per parameter, carrying the loss scale; None leaves the parameter at w. With a norm
                it may also be noise that is not drawn yet.
            rho: The radius: a number, or a rule, which may size the parts of the move differently.
            norm: The divisor; by default the 2-norm of the direction.
            norms: The divisors for rules with a radius for each parameter, shape (K,); by default the 2-norms of the
                directions.
            params: The parameters that move; by default those that may be perturbed.
            consume: Empty the list of directions, so that their memory can be freed.

        Raises:
            ValueError: The number of directions is not that of the parameters.

        Yields:
            The norm, unscaled, and whether the move was skipped because it was zero or not finite.
        """
        moving = list(self.params.values()) if params is None else list(params)
        if len(direction) != len(moving):
            raise ValueError(
                f"the direction has {len(direction)} tensors for {len(moving)} parameters: pass one, or None, for "
                "each of passes.params; ascend empties the list, so to use it again pass consume=False"
            )
        if norm is None:
            norm = global_norm([d for d in direction if isinstance(d, Tensor)]).to(self.device)
        rule = as_radius(rho)
        known = rule.known()
        if known is None:
            sizes = rule.sizes(self._climb(direction, moving, norm, norms))
        else:  # the move itself reads the size of a step on the CPU
            sizes = sizes_of(known, norm, on_the_host=norm.is_cpu)
        if sizes.per_parameter:
            direction = _multiplied(direction, sizes.steps, consume=consume)
            consume, step = True, torch.ones_like(norm)
        else:
            step = sizes.steps
        meant: list[Any] | None = list(direction) if is_measured() else None
        with self.move(moving, direction, step, consume=consume, rounded=True) as moved:
            share = None
            if meant is not None:
                share = arrived(
                    moved, moving, meant, step, grids_of(self.inner, self.objective_kind, moving, self.device)
                )
                meant.clear()
            unscaled = norm if self._is_unscaled() else norm / self.scaled(torch.ones_like(norm))
            skipped = sizes.steps.logical_not()
            skipped = skipped.all() if skipped.ndim else skipped
            yield Ascent(norm=unscaled, skipped=skipped, arrived=share, radius=sizes.radius)

    def _climb(
        self,
        direction: Sequence[Tensor | Noise | None],
        moving: Sequence[nn.Parameter],
        norm: Tensor,
        norms: Tensor | None,
    ) -> Climb:
        """What a rule for the radius may ask about this ascent."""
        is_all = len(moving) == len(self.params) and all(map(operator.is_, moving, self.params.values()))
        known = {} if is_all else {id(p): name for name, p in self.named.items()}
        names = [*self.params] if is_all else [known.get(id(p), "?") for p in moving]

        def of_each() -> Tensor:
            return direction_norms(direction).to(norm) if norms is None else norms

        def loss() -> Tensor:
            assert self.followed.loss is not None
            mean = self.followed.loss / self.fraction
            return self.ranks.mean(mean) if self.scope == "global" else mean

        return Climb(
            norm=norm,
            model=self.inner,
            names=names,
            params=moving,
            scale=lambda: self.scaled(torch.ones_like(norm)) * self.fraction,
            norm_of_each=None if Noise in map(type, direction) else of_each,
            loss=loss,
        )

    @contextmanager
    def move(
        self,
        params: Sequence[nn.Parameter],
        direction: Sequence[Tensor | Noise | None],
        step: Tensor,
        *,
        consume: bool = True,
        rounded: bool = False,
        mirrored: bool = False,
    ) -> Iterator[Moved]:
        """Moves to w + step * direction and always back, see :func:`deltasam.step.moving.perturbed`.

        With ``rounded``, to the precision in which the gradient pass has used the parameters; with ``mirrored`` both
        sides are made at once, where that is faster.
        """
        require_ordinary(params, self.params)
        check_move(self.inner, params, self.named)
        self.ranks.reshard()
        grids = grids_of(self.inner, self.objective_kind, params, self.device) if rounded else None
        seed = self._seed.child(_ROUNDING, self.count.forwards)
        move = perturbed(params, direction, step, consume=consume, mirrored=mirrored, grids=grids, seed=seed)
        with move as moved, without_steps(self.trainable):
            self._moved = moved
            try:
                yield moved
            finally:
                self._moved = None
                self.ranks.reshard()

    def parts(self, *, without_side_effects: bool = False, one_exchange: bool = False) -> Iterator[Self]:
        """As :meth:`StepBatch.parts`; all parts together count as one sweep."""
        count = self.count
        parts = super().parts(without_side_effects=without_side_effects, one_exchange=one_exchange)
        for k, part in enumerate(parts):
            forwards, backwards = count.forwards, count.backwards
            yield part
            if k:
                made = count.forwards - forwards, count.backwards - backwards
                count.repeated = count.repeated[0] + made[0], count.repeated[1] + made[1]

    def accumulate(self, *, keep_side_effects: bool = False, cotangents: Cotangents | None = None) -> Tensor:
        """Adds the gradient of the mean loss to ``.grad`` and returns the losses. One forward, one backward.

        Args:
            keep_side_effects: As in :meth:`losses`.
            cotangents: Derivatives by the outputs of the model that :meth:`gradient` has kept; they replace those of
                this pass.
        """
        self.count.forwards += 1
        self.count.backwards += 1
        parts, last, model = [], len(self.batches) - 1, self.inner if self.ranks.keeps_gradients else self.model
        replace = None if cotangents is None else cotangents.replace
        with torch.enable_grad(), self.one_pass(keep_side_effects):
            for k in range(last + 1):
                with self.ranks.no_sync(k < last and not self.ranks.keeps_gradients):
                    losses = self._evaluate(k, model, graph=True, outputs=replace)
                    with no_autocast(losses.device):
                        self.scaled(self._weighted_mean(losses, k)).backward()  # type: ignore[no-untyped-call]
                    if keep_side_effects and self._moved is not None:  # the only pass: there is no gradient pass
                        targets = list(self.params.values())
                        note_grids(self.inner, self.objective_kind, losses, targets, [p.grad for p in targets])
                parts.append(losses.detach())
                del losses
        if self.ranks.keeps_gradients and self.scope == "global":
            self.ranks.share_gradients(list(self.trainable.values()))
        return self.joined(parts)

    def evaluate(self, unperturbed_weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Losses of all instances (N,), scaled so that their mean is the objective.

        The caller chooses the gradient mode, the random streams and the buffers.

        Args:
            unperturbed_weights: The values at w by name, for the part of an objective that stays there, if the caller
                calls the model with other weights.
        """
        batches = range(len(self.batches))
        return self.joined([self._evaluate(k, self.inner, unperturbed_weights=unperturbed_weights) for k in batches])

    # -- helpers for the methods ---------------------------------------------------------------------------------

    def extra(self) -> AbstractContextManager[None]:
        """A pass without side effects that starts with the same random draws and buffers as the pass at w."""
        if self._replay is None:
            raise RuntimeError("this step is limited to a single pass: Passes(..., replay=False)")
        return self._replay.extra()

    @contextmanager
    def fresh_grads(self) -> Iterator[dict[str, nn.Parameter]]:
        """Empties ``.grad``, so that a method can modify this step's gradient, and adds the earlier one at the end.

        Each replica works on its own gradient, and the results are averaged once at the end; with ``scope="global"``
        all work on the mean.
        """
        with set_aside(self.trainable), without_steps(self.trainable):
            self.ranks.keeps_gradients = self.ranks.replicated
            try:
                yield self.trainable
            finally:
                self.ranks.keeps_gradients = False
        if self.ranks.replicated and self.scope == "local":
            self.ranks.share_gradients(list(self.trainable.values()))

    @contextmanager
    def perturbed_by(self, without: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Passes inside are perturbed by something else than a move of the weights, such as hooks.

        Args:
            without: A context without the perturbation, for objectives of which a part stays at w.
        """
        self._without = without
        try:
            yield
        finally:
            self._without = None

    def _is_unscaled(self) -> bool:
        return isinstance(self._scale, (int, float)) and self._scale == 1

    def scaled(self, value: Tensor) -> Tensor:
        """The value times the loss scale."""
        return scaled(value, self._scale)

    def rewind(self) -> None:
        """Restores random streams and buffers to the start of the step, so that the pass at w can be repeated."""
        if self._replay is not None:
            self._replay.rewind()

    def one_pass(self, keep_side_effects: bool) -> AbstractContextManager[None]:
        """The context of the pass at w, or of an extra one."""
        return (nullcontext() if self._replay is None else self._replay.at_w()) if keep_side_effects else self.extra()

    # -- one micro-batch -----------------------------------------------------------------------------------------

    def _evaluate(
        self,
        k: int,
        model: nn.Module,
        *,
        graph: bool = False,
        ascending: bool = False,
        unperturbed_weights: Mapping[str, Tensor] | None = None,
        outputs: Callable[[int, Any], Any] | None = None,
    ) -> Tensor:
        """Losses of micro-batch k; ``outputs(k, ...)`` may change the graph of the outputs that they come from."""
        batch = one_more(self.batches[k])
        before = versions(batch) if self._replay is not None else None
        objective: Any = self.objective
        unperturbed = None
        has_unperturbed_part = getattr(objective, "has_unperturbed_part", False)
        is_elsewhere = self._moved is not None or ascending or unperturbed_weights is not None
        if self._without is not None and has_unperturbed_part:
            unperturbed = unperturbed_without(objective, self.inner, batch, self._without)
        elif is_elsewhere and has_unperturbed_part:
            if self._moved is not None:
                require_whole("an objective of which a part stays at w", list(self.params.values()))
            unperturbed = unperturbed_part(objective, self.inner, batch, self._moved, unperturbed_weights or {})
        with part_of_a_step() if self._is_part else nullcontext():
            if unperturbed is None and outputs is None:
                losses: Tensor = objective(model, batch)
            else:
                whole = unperturbed is None
                found = objective.forward(model, batch) if whole else objective.complete(model, batch, unperturbed)
                losses = objective.losses(found if outputs is None else outputs(k, found), batch)
        if before is not None:
            warn_if_changed(self.batches[k], before)
        expected = self.sizes[k]
        check_losses(losses, graph=graph, batch=batch if expected is None else None)
        if expected is not None and losses.shape[0] != expected:
            raise ValueError(
                f"the objective returned {losses.shape[0]} losses instead of {expected}: it must return one loss per "
                "instance, in every pass of a step. If an instance has several rows of the batch, give the "
                "objective a method prepare_batch(model, batch) that returns a batch with one row per instance"
            )
        self.sizes[k] = losses.shape[0]
        return losses


def direction_norms(direction: Sequence[Any]) -> Tensor:
    """The norm of the direction of each parameter, shape (K,); 0 where there is none."""
    present = [k for k, d in enumerate(direction) if d is not None]
    if not present:
        return torch.zeros(len(direction), device="cpu")
    found = tensor_norms([direction[k] for k in present])
    each = found.unbind(0)
    zero = torch.zeros_like(each[0])
    where = dict(zip(present, each, strict=True))
    return torch.stack([where.get(k, zero) for k in range(len(direction))])


def _multiplied(direction: Sequence[Any], steps: Tensor, *, consume: bool) -> list[Any]:
    """The direction of each parameter times its own step; zero where the step is zero, whatever the direction is."""
    given = list(direction)
    if consume and isinstance(direction, list):
        direction.clear()
    for k, d in enumerate(given):  # one by one, so that each direction is freed as soon as it is used
        if d is not None:
            given[k] = masked_product(dense(d), steps[k].to(d.device, d.dtype))
    return given
