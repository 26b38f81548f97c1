"""The passes of one step: where the model, the batch and the objective meet, with the same randomness every time.

A method is written in four verbs: ``losses`` (no gradient), ``gradient`` (of the weighted losses, for the ascent),
``ascend`` (to w + eps and back), ``accumulate`` (``backward`` into ``.grad``). Micro-batches, loss scaling, autocast,
random streams, buffers, counting and checking the losses are dealt with here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.parallel.distributed import Ranks, Scope, require_whole
from deltasam.step.batches import MicroBatches, batch_size, one_more, ratio, shares, take, tensors, versions
from deltasam.step.branches import Branches
from deltasam.step.checks import check_losses, check_move, require_real, say_if_changed
from deltasam.step.gradients import Scaler as Scaler
from deltasam.step.gradients import gradient, scaled, set_aside, without_steps
from deltasam.step.parts import part_of_a_step
from deltasam.step.perturb import Ascent as Ascent
from deltasam.step.perturb import Moved, Selection, global_norm, perturbed, select, step_size
from deltasam.step.precision import arrived, grids_of, is_measured, no_autocast, note_grids
from deltasam.step.randomness import Randomness, Replay, Seed, accelerators
from deltasam.step.unperturbed import unperturbed_part

ObjectiveLike = Callable[[nn.Module, Any], Tensor]
_ROUNDING = 2**32  # tells the seeds of the rounding from those of random directions


@dataclass
class Count:
    """How many passes a step has made so far; a sweep over micro-batches is one pass."""

    forwards: int = 0
    backwards: int = 0


class Passes:
    """The passes of one step of a method.

    Args:
        model: The model, in the mode (train or eval) it is to be used in.
        batch: One batch, or :class:`~deltasam.MicroBatches`.
        objective: Maps (model, batch) to losses of shape (N,).
        params: Which parameters may be perturbed.
        scale: Factor on the loss, or a ``GradScaler``.
        randomness: Whether extra passes see the same random draws.
        scope: Whether the ascent follows the gradient of this process or of all, see :class:`~deltasam.Method`.
        replay: Remember the random streams and buffers for extra passes; a method with a single pass needs none.
        gather: Whether sharded parameters are to be whole during the step.
        seed: The method's own and the number of the step, for the rounding of perturbations.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        objective: ObjectiveLike,
        *,
        params: Selection = "all",
        scale: float | Tensor | Scaler = 1.0,
        randomness: Randomness = "shared",
        scope: Scope = "local",
        replay: bool = True,
        gather: bool = False,
        seed: Seed = Seed(0, 0),  # noqa: B008 - a frozen record
    ) -> None:
        self.model = model
        self.ranks = Ranks(model, gather=gather)
        # DDP synchronises in backward(); the ascent goes through the module inside.
        self.inner: nn.Module = self.ranks.inner
        self.batches = batch if isinstance(batch, MicroBatches) else MicroBatches([batch])
        self.objective = objective
        self._kind: Any = objective  # what a part of the step puts in its place is of the same kind
        self.named = dict(self.inner.named_parameters())  # a walk through all modules: one is enough
        self.trainable = {name: p for name, p in self.named.items() if p.requires_grad}
        self.params = select(self.inner, params, self.trainable)
        self.count = Count()
        self.updated: set[str] = set()  # the buffers of the method that this step has updated
        self.branches = Branches(self.device)
        self.sizes: list[int | None] = [None] * len(self.batches)
        self.scope, self._scale, self._seed = scope, scale, seed
        self._moved: Moved | None = None
        self._is_part = len(self.batches) > 1  # of a step: what is passed over at a time
        self._shares = self._micro_batch_shares()
        devices = accelerators([*self.named.values(), *tensors(self.batches)])
        self._from_here: Callable[..., Replay] = partial(Replay, self.inner, devices, randomness)
        self._replay = self._from_here() if replay else None

    @property
    def device(self) -> torch.device:
        """Where scalars of the step live: with the first trainable parameter."""
        return next(iter(self.params.values())).device

    @property
    def share(self) -> float | Tensor:
        """What a single batch counts in the step it is a part of: 1, or less for one micro-batch of several."""
        return self._shares[0]  # type: ignore[no-any-return]

    # -- the four verbs ------------------------------------------------------------------------------------------

    def losses(self, *, keep_side_effects: bool = False, concurrent: bool = False) -> Tensor:
        """Losses of the instances without a graph, shape (N,). One forward.

        Args:
            keep_side_effects: This is the pass at w whose traces (random draws, BatchNorm statistics) the step leaves behind.
            concurrent: Nothing needs them before ``branches.join()``: a recorded pass may run beside the next ones.
        """
        self.count.forwards += 1
        place = self.branches.concurrent(p.data for p in self.inner.parameters()) if concurrent else nullcontext()
        with torch.no_grad(), place, self._pass(keep_side_effects):
            losses = self.evaluate().detach()
        self.ranks.settle()
        return losses

    def gradient(
        self,
        weights: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        keep_side_effects: bool = True,
        params: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses and the gradient of their weighted mean, leaving ``.grad`` alone. One forward, one backward.

        Args:
            weights: g, shape (N,), or a function of the losses (N,) that returns g; uniform by default. With several
                micro-batches the function needs the losses of all instances first, which takes one more forward.
            keep_side_effects: As in :meth:`losses`.
            params: With respect to what; the parameters chosen for perturbation by default.

        Returns:
            The losses (N,), detached, and one gradient per parameter, None where it took no part. The gradients carry
            the loss scale. With ``scope="global"`` they are the mean over all processes.
        """
        self.ranks.check(self.scope)
        if callable(weights) and len(self.batches) > 1:
            weights = weights(self.losses())
        self.count.forwards += 1
        self.count.backwards += 1
        targets = list(self.params.values()) if params is None else list(params)
        require_real(targets, self.trainable)
        parts = []
        with (
            torch.enable_grad(),
            self._pass(keep_side_effects),
            gradient(targets, self.trainable, self.ranks.sharded) as total,
        ):
            for k in range(len(self.batches)):
                losses = self._evaluate(k, self.inner, graph=True, ascending=True)
                g = weights(losses.detach()) if callable(weights) else self._part(weights, k)
                with no_autocast(losses.device):
                    total.add(self._mean(losses, k, g))
                note_grids(self.inner, self._kind, losses, targets, total.sum())
                parts.append(losses.detach())
                del losses
            grads = total.sum()
        if self.scope == "global" and self.ranks.replicated:
            grads = self.ranks.mean_gradients(grads, targets)
        self.ranks.settle()
        return self.joined(parts), grads

    @contextmanager
    def ascend(
        self,
        direction: Sequence[Tensor | None],
        rho: float,
        *,
        norm: Tensor | None = None,
        params: Sequence[nn.Parameter] | None = None,
        consume: bool = True,
    ) -> Iterator[Ascent]:
        r"""Moves to :math:`w + \rho \cdot direction / norm` (Eq. 1's one ascent step) and always back.

        Args:
            direction: One tensor per parameter, carrying the loss scale; None stays.
            rho: The radius.
            norm: What to divide by; the 2-norm of the direction by default.
            params: The parameters that move; those chosen for perturbation by default.
            consume: The direction is given away, so that its memory can be freed.

        Yields:
            The norm, unscaled, and whether the move was skipped because it was zero or not finite.
        """
        moving = list(self.params.values()) if params is None else list(params)
        if norm is None:
            norm = global_norm([d for d in direction if d is not None]).to(self.device)
        step = step_size(rho, norm)
        meant = list(direction) if is_measured() else None
        with self.move(moving, direction, step, consume=consume, rounded=True) as moved:
            share = None
            if meant is not None:
                share = arrived(moved, moving, meant, step, grids_of(self.inner, self._kind, moving, self.device))
                meant.clear()
            yield Ascent(norm=norm / self.scaled(torch.ones_like(norm)), skipped=step == 0, arrived=share)

    @contextmanager
    def move(
        self,
        params: Sequence[nn.Parameter],
        direction: Sequence[Tensor | None],
        step: Tensor,
        *,
        consume: bool = True,
        rounded: bool = False,
    ) -> Iterator[Moved]:
        """Moves to w + step * direction and always back, see :func:`deltasam.step.perturb.perturbed`.

        Args:
            params: The parameters to move.
            direction: One tensor per parameter; None stays.
            step: A scalar.
            consume: The direction is given away, so that its memory can be freed.
            rounded: Round to what the gradient pass has used the parameters in; for passes in the same precision.
        """
        check_move(params, self.named)
        self.ranks.settle()
        grids = grids_of(self.inner, self._kind, params, self.device) if rounded else None
        seed = self._seed.child(_ROUNDING, self.count.forwards)
        move = perturbed(params, direction, step, consume=consume, grids=grids, seed=seed)
        with move as moved, without_steps(self.trainable):
            self._moved = moved
            try:
                yield moved
            finally:
                self._moved = None
                self.ranks.settle()

    def accumulate(self, *, keep_side_effects: bool = False) -> Tensor:
        """Adds the gradient of the mean loss to ``.grad`` as ``backward`` does. One forward, one backward.

        Args:
            keep_side_effects: As in :meth:`losses`.

        Returns:
            The losses, detached.
        """
        self.count.forwards += 1
        self.count.backwards += 1
        parts, last, model = [], len(self.batches) - 1, self.inner if self.ranks.apart else self.model
        with torch.enable_grad(), self._pass(keep_side_effects):
            for k in range(last + 1):
                with self.ranks.quiet(k < last and not self.ranks.apart):
                    losses = self._evaluate(k, model, graph=True)
                    with no_autocast(losses.device):
                        self._mean(losses, k, None).backward()  # type: ignore[no-untyped-call]
                    if keep_side_effects and self._moved is not None:  # the only pass: there is no gradient pass
                        targets = list(self.params.values())
                        note_grids(self.inner, self._kind, losses, targets, [p.grad for p in targets])
                parts.append(losses.detach())
                del losses
        if self.ranks.apart and self.scope == "global":
            self.ranks.share_gradients(list(self.trainable.values()))
        return self.joined(parts)

    def evaluate(self, at_w: Mapping[str, Tensor] | None = None) -> Tensor:
        """Losses of all instances (N,), scaled so that their mean is the objective: the caller sets the scene.

        Args:
            at_w: The weights of what stays at w (an objective's held part), by name, if the caller lends others.
        """
        return self.joined([self._evaluate(k, self.inner, at_w=at_w) for k in range(len(self.batches))])

    # -- helpers for the methods ---------------------------------------------------------------------------------

    def extra(self) -> AbstractContextManager[None]:
        """A pass other than the one at w: same random draws, same buffers, no trace."""
        if self._replay is None:
            raise RuntimeError("this step was set up for a single pass (replay=False)")
        return self._replay.extra()

    @contextmanager
    def fresh_grads(self) -> Iterator[dict[str, nn.Parameter]]:
        """Sets ``.grad`` aside, so that what is accumulated inside can be worked on; adds the two afterwards.

        Of replicas each works on its own gradient, and the results are averaged at the end, in one go; with
        ``scope="global"`` all work on the mean.
        """
        with set_aside(self.trainable), without_steps(self.trainable):
            self.ranks.apart = self.ranks.replicated
            try:
                yield self.trainable
            finally:
                self.ranks.apart = False
        if self.ranks.replicated and self.scope == "local":
            self.ranks.share_gradients(list(self.trainable.values()))

    def scaled(self, value: Tensor) -> Tensor:
        """The value times the loss scale."""
        return scaled(value, self._scale)

    def subset(self, index: Tensor) -> Passes:
        """The passes of this step over some instances of its batch only; they are counted with the others.

        Raises:
            ValueError: The step has several micro-batches, or the batch has no tensors to index.
        """
        size = self.sizes[0] or batch_size(self.batches[0])
        if (n := len(self.batches)) > 1 or size is None:
            which = f"MicroBatches of {n}: call backward() for each, with scale=1 / {n}" if n > 1 else "one without"
            raise ValueError(f"a part of the batch can be taken from one batch of tensors only, not from {which}")
        other = copy(self)
        other.batches, other._is_part = MicroBatches([take(self.batches[0], index, size)]), True
        other.sizes = [index.shape[0]]
        return other

    def parts(self, *, without_side_effects: bool = False) -> Iterator[Passes]:
        """The micro-batches one by one, each with all its passes, for methods that perturb instances and not batches.

        Args:
            without_side_effects: All passes are extra ones, and each part follows on the one before, as in one pass over all; else a
                part starts where the random streams are when its turn comes.
        """
        replay = self._from_here(watch=True) if without_side_effects and len(self.batches) > 1 else self._replay
        for k, batch in enumerate(self.batches):
            part = copy(self)
            part.batches, part.sizes, part._shares = MicroBatches([batch]), [self.sizes[k]], [self._shares[k]]
            if k:
                replay = replay.following() if without_side_effects and replay is not None else self._from_here()
            part._replay = replay
            with self.ranks.quiet(k < len(self.batches) - 1):
                yield part
            self.sizes[k] = part.sizes[0]

    def instances(self, index: Tensor, *, alone: bool) -> Passes:
        """The passes over some instances of a part, whose gradient is their share of the gradient of the step.

        Args:
            index: Which instances.
            alone: Cut them out of the batch, which is cheaper; or let the whole batch through, whatever the objective,
                with the same random draws for every instance as in the batch.
        """
        size = self.sizes[0] or batch_size(self.batches[0])
        assert size is not None
        objective = self.objective
        if alone:
            other = self.subset(index)
            items = getattr(objective, "items", lambda batch: None)
            here, whole = items(other.batches[0]), items(self.batches[0])
            if here is not None and whole is not None:  # a token mean is over the tokens of the whole batch
                factor = ratio(here, whole) * (size / index.shape[0])
                other.objective = lambda model, batch: objective(model, batch) * factor
        else:
            other = copy(self)
            other.objective = lambda model, batch: objective(model, batch)[index]
            other.sizes = [index.shape[0]]
        other._shares = [self._shares[0] * (index.shape[0] / size)]
        return other

    def rewind(self) -> None:
        """Puts random streams and buffers back to the start of the step: the pass at w has to be made again."""
        if self._replay is not None:
            self._replay.rewind()

    # -- the mechanism -------------------------------------------------------------------------------------------

    def _pass(self, keep_side_effects: bool) -> AbstractContextManager[None]:
        return (nullcontext() if self._replay is None else self._replay.at_w()) if keep_side_effects else self.extra()

    def _evaluate(
        self,
        k: int,
        model: nn.Module,
        *,
        graph: bool = False,
        ascending: bool = False,
        at_w: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        batch = one_more(self.batches[k])
        before = versions(batch) if self._replay is not None else None
        objective: Any = self.objective
        held = None
        if (self._moved is not None or ascending or at_w is not None) and getattr(
            objective, "has_unperturbed_part", False
        ):
            if self._moved is not None:
                require_whole("an objective of which a part stays at w", list(self.params.values()))
            held = unperturbed_part(objective, self.inner, batch, self._moved, at_w or {})
        with part_of_a_step(self._is_part):
            if held is None:
                losses: Tensor = objective(model, batch)
            else:
                losses = objective.losses(objective.complete(model, batch, held), batch)
        if before is not None:
            say_if_changed(self.batches[k], before)
        expected = self.sizes[k]
        check_losses(losses, graph=graph, batch=batch if expected is None else None)
        if expected is not None and losses.shape[0] != expected:
            raise ValueError(
                f"the objective returned {losses.shape[0]} losses where {expected} were expected: it must return "
                "one loss per instance, in every pass of a step"
            )
        self.sizes[k] = losses.shape[0]
        return losses

    def _micro_batch_shares(self) -> list[Any]:
        """Weight of each micro-batch's mean in the mean of them all: its share of the items, or of the instances."""
        if len(self.batches) == 1:
            return [1.0]
        getattr(self.objective, "check_parts", lambda batches: None)(self.batches)
        items = getattr(self.objective, "items", lambda batch: None)
        counts: list[Any] = [items(batch) for batch in self.batches]
        if any(count is None for count in counts):
            counts = self.sizes = [batch_size(batch) for batch in self.batches]
        # Without any item (0 / 0) they are zero, as the losses are.
        return shares(counts)

    def _mean(self, losses: Tensor, k: int, weights: Tensor | None) -> Tensor:
        mean = losses.mean() if weights is None else (losses * weights.to(losses.dtype)).mean()
        share = self._shares[k]
        if isinstance(share, Tensor):
            mean = mean * share.to(mean)
        elif share != 1:
            mean = mean * share
        return self.scaled(mean)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Losses of all instances, scaled so that their mean is the objective of the whole batch."""
        if len(parts) == 1:
            return parts[0]
        total = sum(part.shape[0] for part in parts)
        scaled = []
        for share, part in zip(self._shares, parts, strict=True):
            here = share.to(part) if isinstance(share, Tensor) else share
            scaled.append(part * (here * total / part.shape[0]))
        return torch.cat(scaled)

    def _part(self, weights: Tensor | None, k: int) -> Tensor | None:
        if weights is None or len(self.batches) == 1:
            return weights
        sizes = [int(size or 0) for size in self.sizes]
        return weights[sum(sizes[:k]) : sum(sizes[: k + 1])]
