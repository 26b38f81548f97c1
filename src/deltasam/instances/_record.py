"""One batched pass at w that remembers what the perturbed pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deltasam.branches import is_recorded
from deltasam.instances._errors import InstancesMixedError, MisreadError, NoRuleError, UncoveredError
from deltasam.instances._gradient import InstanceGradients, collect
from deltasam.instances._places import Places
from deltasam.instances._tensors import PerInstance
from deltasam.instances._verify import describe, verify
from deltasam.precision import no_autocast

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

    def rounded(self, *, widening: bool = False) -> Recording:
        """The same with output gradients in bfloat16; the norms stay those of the gradients as they were computed.

        Args:
            widening: Only the output gradients of layers that put out more than they take in.
        """
        return replace(self, gradients=self.gradients.rounded(widening=widening))

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
        InstancesMixedError: The loss of one instance depends on the others.
        UncoveredError: A parameter is used in a way that no rule covers.
    """
    chosen = params if params is not None else {n: p for n, p in model.named_parameters() if p.requires_grad}
    places = Places(model, chosen)
    wish = _Wish(run, size, group, scale, tuple(terms))
    why: MisreadError | None = None
    for attempt in range(4):
        found = _reading(places, wish, why, last=attempt == 3)
        if isinstance(found, Recording):
            return found
        why, wish = found, replace(wish, size=found.learned_size or wish.size)
    raise UncoveredError(f"{why}; the low-rank engine could not tell where the instances are", list(chosen))


@dataclass(frozen=True)
class _Wish:
    """The arguments of :func:`record` that an attempt needs."""

    run: Run
    size: int | None
    group: int
    scale: Callable[[Tensor], Tensor] | None
    terms: tuple[tuple[InstanceGradients, Tensor], ...]


def _reading(places: Places, wish: _Wish, why: MisreadError | None, *, last: bool) -> Recording | MisreadError:
    """The recording under the current reading of the inputs, or why it has to be made again under another."""
    try:
        return _attempt(places, wish, last=last)
    except MisreadError as changed:
        return changed.with_traceback(None)  # the frames hold the whole graph
    except NoRuleError as found:
        message = describe(places.model, found.parameters, f"an operation ({found.operation})")
        raise UncoveredError(message, found.parameters) from found
    except (RuntimeError, ValueError, TypeError) as error:
        if why is None or isinstance(error, (InstancesMixedError, UncoveredError)):
            raise
        message = f"{why}; under another reading the model fails: {error}"
        raise UncoveredError(message, list(places.params)) from error


def _attempt(places: Places, wish: _Wish, *, last: bool) -> Recording:
    scale = wish.scale
    with torch.enable_grad(), places.taken(wish.size, wish.group, wish.terms, recording=True) as current:
        losses = wish.run()
        state = current()
        if isinstance(losses, PerInstance) or losses.shape[0] != state.size:
            found_size = None if isinstance(losses, PerInstance) else int(losses.shape[0])
            why = f"the model was called with {state.size} instances, the losses are of {tuple(losses.shape)}"
            raise MisreadError(why, found_size)
        state.recording = False  # activation checkpointing calls the layers again
        with no_autocast(losses.device):
            total = losses.sum() if scale is None else scale(losses.sum())
            memory, params = places.memory, places.params
            key = (tuple(params), frozenset(state.seen.items()))
            check = key not in memory.verified and not is_recorded(losses.device)
            edges = [call.edge for call in state.calls]
            found = torch.autograd.grad(total, edges, retain_graph=check, allow_unused=True) if edges else ()
            gradients = collect(state.calls, found, state.grouping)
            if check and verify(places.model, losses, params, state, gradients, memory, scale, last=last):
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
