"""One batched pass at w that remembers what the perturbed pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.instances._errors import NoRule, SizeChanged, Uncovered
from deltasam.instances._gradient import InstanceGradients, collect
from deltasam.instances._places import Places
from deltasam.instances._tensors import PerInstance
from deltasam.instances._verify import describe, verify

Run = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Recording:
    r"""Losses and per-instance gradients of one batched pass.

    Attributes:
        losses: :math:`l_i`, shape (N,), detached.
        gradients: The gradients of the groups, in factors.
        norms: Their norms, shape (G,); G = N for groups of one.
    """

    losses: Tensor
    gradients: InstanceGradients
    norms: Tensor
    places: Places

    def perturbed(self, c: Tensor) -> AbstractContextManager[None]:
        r"""The model at :math:`w + c_g \nabla l_g(w)` for every group, c of shape (G,); see :func:`perturbed`."""
        return perturbed(self.places, [(self.gradients, c)])


def record(
    model: nn.Module,
    run: Run,
    params: Mapping[str, Tensor] | None = None,
    *,
    size: int | None = None,
    group: int = 1,
    scale: Callable[[Tensor], Tensor] | None = None,
    terms: Sequence[tuple[InstanceGradients, Tensor]] = (),
) -> Recording:
    r"""Per-instance gradients of the losses that ``run()`` returns, from one batched forward and one backward.

    The backward goes to the outputs of the layers only; no weight gradient is computed. The first time a model is seen
    (and whenever the shapes of its inputs leave open where the instances are) the gradient of the last group is
    compared with autograd's, so that a weight used in a way the engine cannot see is noticed, not skipped.

    Memory: the inputs and output gradients of every layer.

    Args:
        model: The model that ``run`` calls.
        run: Makes one pass and returns the losses, (N,), with their graph; the same draws every time it is called.
        params: The parameters to differentiate by, by name; all that require gradients by default.
        size: N, if known; otherwise taken from the first tensor the model is called with.
        group: Number of instances that share a perturbation.
        scale: Loss scaling; cancels in what is made of the norms.
        terms: Record at these perturbed weights instead of at w (several ascent steps).

    Raises:
        InstancesMixed: The loss of one instance depends on the others.
        Uncovered: A parameter is used in a way that no rule covers.
    """
    chosen = params if params is not None else {n: p for n, p in model.named_parameters() if p.requires_grad}
    places = Places(model, chosen)
    for attempt in range(4):
        try:
            return _attempt(places, run, size, group, scale, terms, last=attempt == 3)
        except NoRule as found:
            message = describe(model, found.parameters, f"an operation ({found.operation})")
            raise Uncovered(message, found.parameters) from found
        except SizeChanged as changed:
            if changed.learned_size is not None:
                size = changed.learned_size
            why = changed
    raise Uncovered(f"{why}; the low-rank engine could not tell where the instances are", list(chosen))


def _attempt(
    places: Places,
    run: Run,
    size: int | None,
    group: int,
    scale: Callable[[Tensor], Tensor] | None,
    terms: Sequence[tuple[InstanceGradients, Tensor]],
    last: bool,
) -> Recording:
    with torch.enable_grad(), places.taken(size, group, terms, recording=True) as current:
        losses = run()
        state = current()
        if isinstance(losses, PerInstance) or losses.shape[0] != state.size:
            raise SizeChanged(f"the model was called with {state.size} instances, the losses are of {tuple(losses.shape)}",
                              None if isinstance(losses, PerInstance) else losses.shape[0])  # fmt: skip
        state.recording = False  # activation checkpointing calls the layers again
        with _no_autocast(losses):
            total = losses.sum() if scale is None else scale(losses.sum())
            memory, params = places.memory, places.params
            key = (tuple(params), frozenset(state.seen.items()))
            check = key not in memory.verified and not _capturing(losses)
            edges = [call.edge for call in state.calls]
            found = torch.autograd.grad(total, edges, retain_graph=check, allow_unused=True) if edges else ()
            gradients = collect(state.calls, found, state.grouping)
            if check:
                if verify(places.model, losses, params, state, gradients, memory, scale, last=last):
                    memory.verified.add(key)
    norms = gradients.norms()
    if norms.device.type == "cpu" and not bool(torch.isfinite(norms).all()):
        # 0 * inf is not 0. Elsewhere looking would mean waiting, and the plain gradient of such a batch is no better.
        gradients = gradients.without(~torch.isfinite(norms))
    return Recording(losses.detach(), gradients, norms, places)


@contextmanager
def perturbed(places: Places, terms: Sequence[tuple[InstanceGradients, Tensor]]) -> Iterator[None]:
    r"""The model computes with :math:`w + \sum_k c_{kg} \nabla_k l_g` for every group g of the batch.

    Plain autograd then gives :math:`\nabla \frac1N \sum_i l_i(w + \epsilon_i)`. The weights themselves are never
    written. Keep the context open during ``backward`` where activation checkpointing is on.

    Args:
        places: Where the parameters of the model are.
        terms: Gradients with their coefficients, (G,) each.
    """
    grouping = terms[0][0].grouping
    with places.taken(grouping.size, grouping.m, terms, recording=False):
        yield


def _capturing(losses: Tensor) -> bool:
    return losses.is_cuda and torch.cuda.is_current_stream_capturing()


def _no_autocast(losses: Tensor) -> AbstractContextManager[Any]:
    kind = losses.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
