"""The passes of FreeLB, TAT and TAVAT: the objective at embeddings that ascend between the passes."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.objectives import perturbed_embeddings
from deltasam.objectives.regularisers import Site, row_norm
from deltasam.step.checks import check_losses
from deltasam.step.gradients import grad
from deltasam.step.norms import global_norm
from deltasam.step.passes import Ascent, Passes

Parts = list[Tensor]
"""What is added to the embeddings of a site: one perturbation per instance, for TAVAT also one per token."""


class EmbeddingAscent:
    """The objective of a step at ``embeddings + sum(parts)``; the gradients of K passes add up to their mean.

    ``start(site, micro_batch)`` returns the parts before the first pass, ``goal(outputs, batch, micro_batch) -> (N,)``
    what to ascend (None: the loss); ``where`` chooses the embeddings, see :func:`perturbed_embeddings`.
    """

    def __init__(
        self,
        passes: Passes,
        number: int,
        start: Callable[[Site, int], Parts],
        *,
        goal: Callable[[Tensor, Any, int], Tensor] | None,
        **where: Any,
    ) -> None:
        self.goal = goal
        self._passes = passes
        self._objective: Any = passes.objective
        self._number, self._start, self._where = number, start, where
        self._sites: list[list[Site]] = [[] for _ in passes.batches]
        self._parts: list[list[Parts]] = [[] for _ in passes.batches]
        self._uphill: list[list[Parts]] = [[] for _ in passes.batches]
        self._done = 0
        self._micro_batch = 0

    def accumulate(self) -> Tensor:
        """One pass: adds 1/K of the gradient to ``.grad``. Returns the losses."""
        self._micro_batch = 0
        self._uphill = [[] for _ in self._sites]
        passes = copy(self._passes)  # not kept: the two would form a reference cycle
        passes.objective = self
        losses = passes.accumulate(keep_side_effects=self._done == 0)
        self._done += 1
        if self.goal is None:
            self._uphill = [[[_gradient(part) for part in parts] for parts in site] for site in self._parts]
        elif self._done < self._number:
            self._passes.count.backwards += 1
        return losses

    def move(self, update: Callable[[Site, Parts, Parts], Parts]) -> Ascent:
        """Gives every site new parts, ``update(site, parts, gradients)``, and returns the norm of the gradient."""
        gradients = [gradient for batch in self._uphill for parts in batch for gradient in parts]
        rows = [row_norm(gradient, "linf") for gradient in gradients]
        sound = [(torch.isfinite(row) & (row > 0)).any() for row in rows]
        with torch.no_grad():
            for sites, parts, gradient in zip(self._sites, self._parts, self._uphill, strict=True):
                parts[:] = [_leaves(update(*each)) for each in zip(sites, parts, gradient, strict=True)]
        norm = global_norm(gradients).to(self._passes.device)
        if self.goal is None:
            norm = norm * self._number / self._passes.scaled(torch.ones_like(norm))
        moved = torch.stack(sound).any().to(norm.device) if sound else torch.zeros_like(norm, dtype=torch.bool)
        return Ascent(norm=norm, skipped=~moved)

    def parts(self) -> list[tuple[Site, Parts]]:
        """All sites with their current parts."""
        pairs = zip(chain(*self._sites), chain(*self._parts), strict=True)
        return [(site, [part.detach() for part in parts]) for site, parts in pairs]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses of the instances at the perturbed embeddings; what :class:`~deltasam.step.passes.Passes` calls."""
        k, self._micro_batch = self._micro_batch, self._micro_batch + 1
        hold = getattr(self._objective, "unperturbed", None)
        held = None if hold is None else hold(model, batch)  # a view that is not perturbed
        losses: Tensor
        with perturbed_embeddings(model, lambda site: self._noise(site, k), batch=batch, **self._where):
            if held is not None:
                losses = self._objective.losses(self._objective.complete(model, batch, held), batch)
            elif self.goal is None:
                losses = self._objective(model, batch)
            else:
                outputs = self._objective.forward(model, batch)
                losses = self._objective.losses(outputs, batch)
            check_losses(losses, graph=True)  # inside: the context raises if the embeddings were not used
        if self.goal is not None and held is None and self._done < self._number - 1:
            self._uphill[k] = self._gradients(self.goal(outputs, batch, k), k)
        if (number := self._number) > 1:
            losses.register_hook(lambda gradient: gradient / number)  # type: ignore[no-untyped-call]
        return losses

    def _noise(self, site: Site, k: int) -> Tensor:
        if self._done == 0:
            self._sites[k].append(site)
            self._parts[k].append(_leaves(self._start(site, k)))
        parts = self._parts[k][site.index] if site.index < len(self._parts[k]) else []
        if not parts or parts[0].shape != site.shape:
            raise ValueError(
                f"the embeddings have shape {tuple(site.shape)}, but in the first pass of the step they had "
                f"{[tuple(other.shape) for other in self._sites[k]]}: all passes must see the same batch"
            )
        return sum(parts[1:], parts[0])

    def _gradients(self, goal: Tensor, k: int) -> list[Parts]:
        leaves = [part for parts in self._parts[k] for part in parts]
        with torch.autocast(goal.device.type, enabled=False):
            # Zero where an extra pass of the objective (SMART's search for noise) does not reach the outputs.
            found = iter(grad(goal.sum(), leaves, retain_graph=True, materialize_grads=True))
        return [[next(found) for _ in parts] for parts in self._parts[k]]


def _leaves(parts: Parts) -> Parts:
    return [part.detach().requires_grad_() for part in parts]


def _gradient(part: Tensor) -> Tensor:
    return torch.zeros_like(part) if part.grad is None else part.grad
