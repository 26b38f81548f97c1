"""One batched pass at w that remembers what the perturbed pass needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.per_instance.algebra.gradient import InstanceGradients, collect
from deltasam.per_instance.interception.calls import PassState
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.interception.tensors import Kind, PerInstance
from deltasam.per_instance.memory import Signature, kind_of
from deltasam.per_instance.verification.errors import (
    COMMON,
    InstancesMixedError,
    MisreadError,
    ModelError,
    NoRuleError,
    RuleError,
    SizeUnknownError,
    SuspectedMixError,
    UncoveredError,
)
from deltasam.per_instance.verification.trial import MOST_TRIALS, is_followed, mixes, plainly, reached_from
from deltasam.per_instance.verification.verify import Checked, Comparison, describe
from deltasam.step.branches import is_recorded
from deltasam.step.checks import is_out_of_memory, uses_a_graph_twice
from deltasam.step.gradients import ReentrantError, grad, refuse_reentrant
from deltasam.step.precision import no_autocast

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
    places: ParameterSlots

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
    objective: Any = None,
) -> Recording:
    r"""Per-instance gradients of the losses that ``run()`` returns, from one batched forward and one backward.

    The backward goes to the outputs of the layers only; no weight gradient is computed. The first time a model is seen
    with an objective (and whenever the shapes of its inputs leave open where the instances are) the gradients of two
    groups are compared with autograd's, and the loss of one at perturbed weights with that of weights that are moved,
    so that a weight that is used in a way the engine cannot see is noticed, not skipped. Two backwards and two
    forwards more.

    Memory: the inputs and output gradients of every layer.

    Args:
        model: The model that ``run`` calls.
        run: Makes one pass and returns the losses, (N,), with their graph; the same draws every time it is called.
        params: The parameters to differentiate by, by name; all that require gradients by default.
        size: N, if known; otherwise taken from the first tensor the model is called with.
        group: Number of instances that share a perturbation.
        scale: Loss scaling; cancels in what is made of the norms.
        terms: Record at these perturbed weights instead of at w (several ascent steps).
        objective: What ``run`` calls with the model: the instances of another one may mix where those of one do not.

    Raises:
        InstancesMixedError: The loss of one instance depends on the others.
        UncoveredError: A parameter is used in a way that no rule covers, or the engine fails where the model alone
            does not.
        ValueError: Two parameters share their memory.
    """
    chosen = params if params is not None else {n: p for n, p in model.named_parameters() if p.requires_grad}
    places = ParameterSlots(
        model, {name: p for name, p in chosen.items() if p.numel()}
    )  # of nothing there is no gradient
    wish = _Wish(run, size, group, scale, tuple(terms), kind_of(objective))
    why: MisreadError | None = None
    for attempt in range(_ATTEMPTS):
        found = _reading(places, wish, why, last=attempt == _ATTEMPTS - 1)
        if isinstance(found, Recording):
            return found
        why, wish = found, replace(wish, size=found.learned_size or wish.size)
    raise UncoveredError(f"{why}; the low-rank engine could not tell where the instances are", list(chosen))


_ATTEMPTS = 5


@dataclass(frozen=True)
class _Wish:
    """The arguments of :func:`record` that an attempt needs."""

    run: Run
    size: int | None
    group: int
    scale: Callable[[Tensor], Tensor] | None
    terms: tuple[tuple[InstanceGradients, Tensor], ...]
    kind: Hashable


def _reading(places: ParameterSlots, wish: _Wish, why: MisreadError | None, *, last: bool) -> Recording | MisreadError:
    """The recording under the current reading of the inputs, or why it has to be made again under another."""
    try:
        return _attempt(places, wish, last=last)
    except MisreadError as changed:
        suspicion: Exception = changed.with_traceback(None)  # the frames hold the whole graph
        if not changed.of_the_losses:
            return changed
    except SuspectedMixError as found:
        suspicion = found.with_traceback(None)
    except (InstancesMixedError, UncoveredError, SizeUnknownError, ReentrantError):
        raise
    except ModelError as found:
        raise found.error from found.error.__cause__
    except COMMON as error:
        if isinstance(error, RuntimeError) and (is_out_of_memory(error) or uses_a_graph_twice(error)):
            raise
        suspicion = error.with_traceback(None)
        suspicion.__context__ = suspicion.__cause__ = None
    if places.guessing:
        if not last and places.guess():
            return MisreadError(str(why))
        places.take_back()
        assert places.fault is not None
        raise places.fault
    if isinstance(suspicion, MisreadError):
        return suspicion
    verdict = _judged(places, wish, suspicion, why)
    raise verdict from (suspicion if isinstance(verdict, UncoveredError) else None)


def _judged(places: ParameterSlots, wish: _Wish, suspicion: Exception, why: MisreadError | None) -> Exception:
    """What an error of a pass with proxies means, by passes without: if those fail, too, it is the model's own error.

    Proxies are in nobody's way who does not look; a model that does, or has its instances elsewhere than in front,
    fails with all kinds of errors. It is for the loop.
    """
    if isinstance(suspicion, SuspectedMixError):
        # A pass of one process alone would wait for shards of the others.
        if places.is_sharded or mixes(places.model, wish.run, suspicion.size, suspicion.members) is not False:
            return InstancesMixedError(
                "the loss of one instance depends on the other instances of the batch (in-batch negatives, statistics "
                "over the batch), so a perturbation per instance is not defined; use SAM or DeltaSAM for such "
                "objectives"
            )
        message = "the low-rank engine could not tell where the instances are"
    elif isinstance(suspicion, NoRuleError):
        message = describe(places.model, suspicion.parameters, f"an operation ({suspicion.operation})")
        return UncoveredError(message, suspicion.parameters)
    elif places.is_sharded:
        return suspicion
    else:
        try:
            plainly(places.model, wish.run)
        except ModelError as own:
            return own.error
        first = str(suspicion).splitlines()[0] if str(suspicion) else ""
        named = isinstance(suspicion, RuleError)
        message = first if named else f"the low-rank engine fails on this model ({type(suspicion).__name__}: {first})"
    return UncoveredError(message if why is None else f"{why}; {message}", list(places.params))


def _attempt(places: ParameterSlots, wish: _Wish, *, last: bool) -> Recording:
    """One recording; what was not compared with autograd before is compared now."""
    recording, signature, checked = _pass_at_w(places, wish, last=last)
    if checked is not None:
        if _goes_the_same_way(places, wish, checked) and checked.proves:
            _try_out(recording, places, wish, checked, last=last)
        if checked.proves:
            places.memory.verified.add(signature)
    return recording


def _pass_at_w(places: ParameterSlots, wish: _Wish, *, last: bool) -> tuple[Recording, Signature, Checked | None]:
    """The pass itself, its signature, and what a comparison of its gradients leaves to look at."""
    scale, checked = wish.scale, None
    with torch.enable_grad(), places.taken(wish.size, wish.group, wish.terms, recording=True) as current:
        losses = wish.run()
        state = current()
        if isinstance(losses, PerInstance) or losses.shape[0] != state.size:
            found_size = None if isinstance(losses, PerInstance) else int(losses.shape[0])
            why = f"the model was called with {state.size} instances, the losses are of {tuple(losses.shape)}"
            raise MisreadError(why, found_size, of_the_losses=True)
        state.recording = False  # activation checkpointing calls the layers again
        with no_autocast(losses.device):
            total = losses.sum() if scale is None else scale(losses.sum())
            signature = _signature(places, state, wish)
            check = signature not in places.memory.verified and not is_recorded(losses.device)
            edges = [call.edge for call in state.calls]
            found = grad(total, edges, retain_graph=check, allow_unused=True) if edges else ()
            gradients = collect(state.calls, found, state.grouping, losses.device)
            if check:
                checked = Comparison(places, losses, state, found, gradients, scale, last).checked()
    norms = gradients.norms()
    if norms.device.type == "cpu" and not bool(torch.isfinite(norms).all()):
        # 0 * inf is not 0. Elsewhere looking would mean waiting, and the plain gradient of such a batch is no better.
        gradients = gradients.without(~torch.isfinite(norms))
    return Recording(losses.detach(), gradients, norms, places), signature, checked


def _signature(places: ParameterSlots, state: PassState, wish: _Wish) -> Signature:
    """What a comparison with autograd holds for.

    In a single group every reading of the inputs gives the right gradient: that proves nothing for several.
    """
    grouping = state.grouping
    m = grouping.m if grouping.groups > 1 else 0
    return tuple(places.params), frozenset(state.seen.items()), m, bool(wish.terms), wish.kind


def _goes_the_same_way(places: ParameterSlots, wish: _Wish, checked: Checked) -> bool:
    """A parameter without a gradient must have none in the model as it is either.

    A function with a backward of its own (``torch.autograd.Function``) takes a proxy for a constant, unseen by anyone.

    Returns:
        False for a model that uses other parameters in every pass, so that passes cannot be compared.

    Raises:
        UncoveredError: A parameter has one.
    """
    felt = {name: g is not None for name, g in zip(places.params, checked.gradients, strict=True)}
    if all(felt.values()) or places.is_sharded:
        return True
    losses = plainly(places.model, wish.run)
    refuse_reentrant(losses)
    reached = reached_from(losses)
    heard = [name for name, p in places.params.items() if id(p) in reached and not felt[name]]
    alike = all(id(p) in reached for name, p in places.params.items() if felt[name])
    if heard and alike:
        raise UncoveredError(describe(places.model, heard, "a function with a backward of its own"), heard)
    return alike


def _try_out(recording: Recording, places: ParameterSlots, wish: _Wish, checked: Checked, *, last: bool) -> None:
    """Looks at the perturbed pass of a signature whose gradient at w is right.

    Raises:
        MisreadError: An input that has no gradient was misread; the other reading is now in the memory.
        UncoveredError: The perturbed pass does not follow the weights.
    """
    memory = places.memory
    if checked.group < 0 or wish.terms or places.is_sharded or len(memory.verified) >= MOST_TRIALS:
        return
    one = torch.ones((), device=recording.losses.device)
    scale = 1.0 if wish.scale is None else float(wish.scale(one))
    model, losses, norms = places.model, recording.losses, recording.norms
    with torch.enable_grad():
        if is_followed(model, wish.run, losses, norms, places.params, checked, scale, recording.perturbed):
            return
    shared: Kind = "shared"
    others = {key: shared for key in checked.unfelt if memory.reading.kinds.get(key) != "shared"}
    if others and not last:
        memory.learn(others)
        raise MisreadError("a layer without a gradient is called with inputs that are laid out in another way")
    raise UncoveredError(
        "the losses of the low-rank engine at perturbed weights are not those of weights that are moved: the model "
        "reads a parameter in a way that goes past the engine, or a rule of your own (register_rule) is wrong",
        list(places.params),
    )


@contextmanager
def perturbed(places: ParameterSlots, terms: Sequence[tuple[InstanceGradients, Tensor]]) -> Iterator[None]:
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
