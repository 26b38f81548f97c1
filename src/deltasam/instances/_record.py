"""One batched pass at w that remembers what the perturbed pass needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.instances._errors import InstancesMixed, NoRule, SizeChanged, Uncovered
from deltasam.instances._gradient import InstanceGradients, collect
from deltasam.instances._layout import Grouping
from deltasam.instances._memory import Memory, memory_of
from deltasam.instances._rules import RULES
from deltasam.instances._step import PassState, Perturbation
from deltasam.instances._tensors import PerInstance, Proxy
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

    model: nn.Module
    params: Mapping[str, Tensor]
    losses: Tensor
    gradients: InstanceGradients
    norms: Tensor

    def perturbed(self, c: Tensor) -> AbstractContextManager[None]:
        r"""The model at :math:`w + c_g \nabla l_g(w)` for every group; see :func:`perturbed`."""
        return perturbed(self.model, self.params, [(self.gradients, c)])


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
    refuse_batch_statistics(model)
    memory = memory_of(model)
    for attempt in range(4):
        try:
            return _attempt(model, run, chosen, memory, size, group, scale, terms, last=attempt == 3)
        except NoRule as found:
            message = describe(model, found.parameters, f"an operation ({found.operation})")
            raise Uncovered(message, found.parameters) from found
        except SizeChanged as changed:
            if changed.learned_size is not None:
                size = changed.learned_size
            why = changed
    raise Uncovered(f"{why}; the low-rank engine could not tell where the instances are", list(chosen))


def _attempt(
    model: nn.Module,
    run: Run,
    params: Mapping[str, Tensor],
    memory: Memory,
    size: int | None,
    group: int,
    scale: Callable[[Tensor], Tensor] | None,
    terms: Sequence[tuple[InstanceGradients, Tensor]],
    last: bool,
) -> Recording:
    with torch.enable_grad(), substituted(model, params, memory, size, group, terms, recording=True) as current:
        losses = run()
        state = current()
        if isinstance(losses, PerInstance) or losses.shape[0] != state.size:
            raise SizeChanged(f"the model was called with {state.size} instances, the losses are of {tuple(losses.shape)}",
                              None if isinstance(losses, PerInstance) else losses.shape[0])  # fmt: skip
        state.recording = False  # activation checkpointing calls the layers again
        with _no_autocast(losses):
            total = losses.sum() if scale is None else scale(losses.sum())
            key = (tuple(params), frozenset(state.seen.items()))
            check = key not in memory.verified and not _capturing(losses)
            edges = [call.edge for call in state.calls]
            found = torch.autograd.grad(total, edges, retain_graph=check, allow_unused=True) if edges else ()
            gradients = collect(state.calls, found, state.grouping)
            if check:
                if verify(model, losses, params, state, gradients, memory, scale, last=last):
                    memory.verified.add(key)
    norms = gradients.norms()
    if norms.device.type == "cpu" and not bool(torch.isfinite(norms).all()):
        # 0 * inf is not 0. Elsewhere looking would mean waiting, and the plain gradient of such a batch is no better.
        gradients = gradients.without(~torch.isfinite(norms))
    return Recording(model, params, losses.detach(), gradients, norms)


@contextmanager
def perturbed(
    model: nn.Module, params: Mapping[str, Tensor], terms: Sequence[tuple[InstanceGradients, Tensor]]
) -> Iterator[None]:
    r"""The model computes with :math:`w + \sum_k c_{kg} \nabla_k l_g` for every group g of the batch.

    Plain autograd then gives :math:`\nabla \frac1N \sum_i l_i(w + \epsilon_i)`. The weights themselves are never
    written. Keep the context open during ``backward`` where activation checkpointing is on.

    Args:
        model: The model.
        params: The parameters that the gradients were recorded for.
        terms: Gradients with their coefficients, (G,) each.
    """
    grouping = terms[0][0].grouping
    with substituted(model, params, memory_of(model), grouping.size, grouping.m, terms, recording=False):
        yield


@contextmanager
def substituted(
    model: nn.Module,
    params: Mapping[str, Tensor],
    memory: Memory,
    size: int | None,
    group: int,
    terms: Sequence[tuple[InstanceGradients, Tensor]],
    *,
    recording: bool,
) -> Iterator[Callable[[], PassState]]:
    """Proxies in the places of the parameters, whatever happens inside; the state of the pass as soon as N is known."""
    names = {id(p): name for name, p in params.items()}
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and id(p) in names]
    states: list[PassState] = []

    def start(count: int) -> None:
        grouping = Grouping(count, min(group, count))
        perturbation = Perturbation(grouping, _by_parameter(terms)) if terms else None
        states.append(PassState(grouping, RULES, names, memory.order, memory.kinds, perturbation, recording))
        proxies = {id(p): Proxy.of(p, states[0]) for _, _, p in places}
        for module, name, p in places:
            module._parameters[name] = proxies[id(p)]  # type: ignore[assignment]

    def guess(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if not states:
            start(max(1, _leading([*args, *kwargs.values()])))  # an empty batch is for the objective to complain about

    handle = None
    try:
        if size is not None:
            start(size)
        else:
            handle = model.register_forward_pre_hook(guess, with_kwargs=True)
        with _eager():
            yield lambda: states[0]
    finally:
        if handle is not None:
            handle.remove()
        for module, name, p in places:
            module._parameters[name] = p  # type: ignore[assignment]


def _by_parameter(terms: Sequence[tuple[InstanceGradients, Tensor]]) -> dict[int, list[tuple[Any, Tensor]]]:
    table: dict[int, list[tuple[Any, Tensor]]] = {}
    for gradients, c in terms:
        for name, factors in gradients.factors.items():
            table.setdefault(name, []).extend((factor, c) for factor in factors)
    return table


def _leading(values: list[Any]) -> int:
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
        if isinstance(value, Mapping):
            return _leading(list(value.values()))
        if isinstance(value, (tuple, list)) and value:
            return _leading(list(value))
    raise ValueError("the number of instances is not visible in the model's inputs; pass size=N")


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises :class:`InstancesMixed` for BatchNorm in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise InstancesMixed(
                f"{name or 'the model'} ({type(module).__name__}) normalises each instance with statistics of the whole "
                "batch, so the loss of one instance depends on the others and a perturbation per instance is not "
                "defined; put it in eval mode, or use GroupNorm or LayerNorm"
            )


def _eager() -> AbstractContextManager[Any]:
    """Compiled code has the operations baked in; while the proxies are in place it runs as written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _capturing(losses: Tensor) -> bool:
    return losses.is_cuda and torch.cuda.is_current_stream_capturing()


def _no_autocast(losses: Tensor) -> AbstractContextManager[Any]:
    kind = losses.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
