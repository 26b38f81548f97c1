"""The batch of one step: its micro-batches, their shares in the mean, and smaller steps over a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deltasam.parallel.ranks import Ranks
from deltasam.step.batches import MicroBatches, batch_size, cut, obstacle_to_cut, ratio, shares, take, tensors
from deltasam.step.counts import HostShares, counts_of
from deltasam.step.randomness import Randomness, Replay, accelerators
from deltasam.step.structure import Structure

if TYPE_CHECKING:
    from typing_extensions import Self

ObjectiveLike = Callable[[nn.Module, Any], Tensor]


class _OfInstances:
    """An objective for some of the instances; everything but the losses is that of the whole objective."""

    def __init__(self, objective: Any, part: Callable[[Tensor], Tensor]) -> None:
        self._objective, self._part = objective, part

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._part(self._objective(model, batch))

    def losses(self, outputs: Any, batch: Any) -> Tensor:
        return self._part(self._objective.losses(outputs, batch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


def prepared(objective: Any, model: nn.Module, batch: Any) -> MicroBatches:
    """The micro-batches of a step, each as ``objective.prepare_batch`` returns it, if that exists."""
    parts = batch if isinstance(batch, MicroBatches) else MicroBatches([batch])
    prepare = getattr(objective, "prepare_batch", None)
    return parts if prepare is None else MicroBatches(prepare(model, part) for part in parts)


class StepBatch:
    """A model, an objective, and one batch or several micro-batches that make up one.

    Attributes:
        model: The model.
        inner: The model without DDP, which would synchronise in the backward of the ascent.
        named: The parameters by name.
        trainable: Those that require gradients.
        batches: The micro-batches; a single batch is the only one.
        sizes: The number of instances of each, as soon as it is known.
        objective: Maps (model, batch) to losses of shape (N,).
        ranks: The processes that train the model.
        randomness: Whether all passes share their random draws.
        fraction: What the gradient of a part is multiplied with, compared with that of its instances in the batch.
        as_whole: What the losses of a micro-batch are multiplied with to be those of the whole batch.

    The arguments are those of :class:`~deltasam.step.passes.Passes`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        objective: ObjectiveLike,
        *,
        randomness: Randomness = "shared",
        replay: bool = True,
        gather: bool = False,
    ) -> None:
        self.model = model
        self.ranks = Ranks(model, gather=gather)
        self.inner: nn.Module = self.ranks.inner
        structure = Structure(self.inner)
        self.named = structure.named
        self.trainable = structure.trainable
        given = batch if isinstance(batch, MicroBatches) else MicroBatches([batch])
        self.batches = prepared(objective, self.inner, given)
        if not all(map(is_, self.batches, given)):  # the objective has called the model, which may have changed it
            structure = Structure(self.inner)
        self.sizes: list[int | None] = [None] * len(self.batches)
        self.objective = objective
        self._is_part = len(self.batches) > 1  # whether a pass sees only a part of the batch at a time
        self._shares = self._micro_batch_shares()
        self.fraction: float | Tensor = 1.0  # of the gradient of the instances that a part consists of
        self.as_whole: float | Tensor = 1.0  # losses of this part, as they are in the whole batch, over its own
        devices = accelerators([*self.named.values(), *tensors(self.batches)])
        self._from_here: Callable[..., Replay] = partial(Replay, self.inner, devices, randomness)
        self.randomness = randomness
        self._replay = self._from_here(structure=structure) if replay else None

    @property
    def share(self) -> float | Tensor:
        """The weight of a single batch in the step that it is a part of: 1, or less for one micro-batch of several."""
        return self._shares[0]  # type: ignore[no-any-return]

    # -- several micro-batches as one ----------------------------------------------------------------------------

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Joins the losses of the micro-batches, scaled so that their mean is the objective of the whole batch."""
        return (
            torch.cat(self.as_in_the_whole(parts, [part.shape[0] for part in parts])) if len(parts) > 1 else parts[0]
        )

    def as_in_the_whole(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Values that are proportional to the losses of each micro-batch, as they are in the whole batch.

        Args:
            parts: The values, one tensor per micro-batch.
            sizes: The number of instances of each micro-batch.
        """
        if len(parts) == 1:
            return parts
        scaled = []
        for share, part, size in zip(self._shares, parts, sizes, strict=True):
            here = share.to(part) if isinstance(share, Tensor) else share
            scaled.append(part * (here * sum(sizes) / size))
        return scaled

    def _micro_batch_shares(self) -> list[Any]:
        """The weight of each micro-batch's mean in the mean of all: its share of the items, or of the instances."""
        if len(self.batches) == 1:
            return [1.0]
        getattr(self.objective, "check_parts", lambda batches: None)(self.batches)
        given = None if HostShares.current is None else HostShares.current.given
        if given is not None:
            return given
        counts = counts_of(self.objective, self.batches)
        if counts is None:
            counts = self.sizes = [batch_size(batch) for batch in self.batches]
        return shares(counts)  # without any item (0 / 0) they are zero, as the losses are

    def _weighted_mean(self, losses: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
        """The contribution of micro-batch k to the weighted mean over all instances."""
        mean = losses.mean() if weights is None else (losses * weights.to(losses.dtype)).mean()
        share = self._shares[k]
        if isinstance(share, Tensor):
            return mean * share.to(mean)
        return mean if share == 1 else mean * share

    def _weights_of(self, k: int, weights: Tensor | None) -> Tensor | None:
        if weights is None or len(self.batches) == 1:
            return weights
        sizes = [int(size or 0) for size in self.sizes]
        return weights[sum(sizes[:k]) : sum(sizes[: k + 1])]

    # -- a part of the batch -------------------------------------------------------------------------------------

    def subset(self, index: Tensor) -> Self:
        """The passes of this step over some instances of its batch; they are counted with the others.

        Raises:
            ValueError: The step has several micro-batches, or the batch does not have one row per instance.
        """
        size = self._only_size()
        if (n := len(self.batches)) > 1 or size is None:
            which = f"MicroBatches of {n}: call backward() for each, with scale=1 / {n}" if n > 1 else "one without"
            raise ValueError(f"a part of the batch can be taken from one batch of tensors only, not from {which}")
        _check_rows(self.batches[0], size)
        other = copy(self)
        other.batches, other._is_part = MicroBatches([take(self.batches[0], index, size)]), True
        other.sizes = [index.shape[0]]
        return other

    def parts(self, *, without_side_effects: bool = False, one_exchange: bool = False) -> Iterator[Self]:
        """The micro-batches one by one, each with all its passes, for methods that perturb instances and not batches.

        Args:
            without_side_effects: Make only extra passes. Each part then starts where the one before ended, as in one
                sweep over all; otherwise it starts where the random streams are when its turn comes.
            one_exchange: Gathered shards, too, exchange gradients once: the processes may have different numbers of
                parts.
        """
        replay = self._from_here(watch=True) if without_side_effects and len(self.batches) > 1 else self._replay
        sizes = [size or batch_size(batch) or 1 for size, batch in zip(self.sizes, self.batches, strict=True)]
        for k, batch in enumerate(self.batches):
            part = copy(self)
            part.batches, part.sizes, part._shares = MicroBatches([batch]), [self.sizes[k]], [self._shares[k]]
            if len(self.batches) > 1:
                part.as_whole = self._shares[k] * sum(sizes) / sizes[k]
            if k:
                replay = replay.following() if without_side_effects and replay is not None else self._from_here()
            part._replay = replay
            with self.ranks.no_sync(k < len(self.batches) - 1, shards=one_exchange):
                yield part
            self.sizes[k] = part.sizes[0]

    def in_parts(self, most: int) -> Self:
        """The same step with micro-batches of at most ``most`` instances.

        Raises:
            ValueError: A batch cannot be cut: it has no tensors, or its rows are not the instances.
        """
        other = copy(self)
        parts: list[Any] = []
        weights: list[Any] = []
        for batch, share in zip(self.batches, self._shares, strict=True):
            size = batch_size(batch)
            if size is None:
                raise ValueError("a batch without tensors cannot be cut into parts")
            if size > most:
                _check_rows(batch, size)
            pieces = [batch] if size <= most else cut(batch, most, size)
            counts = counts_of(self.objective, pieces) or [batch_size(piece) for piece in pieces]
            parts += pieces
            weights += [share * each for each in shares(counts)] if len(pieces) > 1 else [share]
        if len(parts) > len(self.batches):
            getattr(self.objective, "check_parts", lambda batches: None)(parts)
            other.batches, other._shares, other._is_part = MicroBatches(parts), weights, True
            other.sizes = [batch_size(part) for part in parts]
        return other

    def instances(self, index: Tensor, *, alone: bool) -> Self:
        """The passes over some instances of a part, whose gradient is their share of the gradient of the step.

        Args:
            index: Which instances.
            alone: Cut them out of the batch if its rows are the instances, which is cheaper, but right only if nothing
                random is drawn: each of them would have the draws of the first row. Otherwise the whole batch passes
                through the model, which is right for any objective.
        """
        size = self._only_size()
        assert size is not None
        objective = self.objective
        if alone and self._rows_are_instances(size):
            other = self.subset(index)
            counts = counts_of(objective, [other.batches[0], self.batches[0]])
            if counts is not None:  # a token mean is over the tokens of the whole batch
                factor = ratio(*counts) * (size / index.shape[0])
                other.objective = _OfInstances(objective, lambda losses: losses * factor)
        else:
            other = copy(self)
            other.objective = _OfInstances(objective, lambda losses: losses[index])
            other.sizes = [index.shape[0]]
        other._shares = [self._shares[0] * (index.shape[0] / size)]
        other.fraction = other._shares[0] / self.as_whole
        return other

    def _rows_are_instances(self, size: int) -> bool:
        """Whether the batch has one row per instance. An objective may need several, such as the answers of a pair."""
        batch = self.batches[0]
        return batch_size(batch) == size and obstacle_to_cut(batch, size) is None

    def _only_size(self) -> int | None:
        return self.sizes[0] or batch_size(self.batches[0])


def _check_rows(batch: Any, size: int) -> None:
    """Raises a ValueError if a batch does not have one row for each of ``size`` instances."""
    rows, obstacle = batch_size(batch), obstacle_to_cut(batch, size)
    if rows != size:
        raise ValueError(
            f"the batch has {rows} rows for {size} losses, so a part of the instances cannot be taken: give the "
            "objective a method prepare_batch(model, batch) that returns a batch with one row per instance, as "
            "deltasam.DPO does"
        )
    if obstacle is not None:
        raise ValueError(
            f"the batch of {size} instances has {obstacle}, so a part of the instances cannot be taken: give what all "
            "instances share a first dimension of 1 with unsqueeze(0), or keep it out of the batch; make of what "
            f"belongs to the instances a tensor with {size} rows; or leave out at_once, or choose a method that takes "
            "the whole batch"
        )
