"""One batched pass at w that records what the perturbed pass needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.per_instance.algebra.gradient import InstanceGradients, collect
from deltasam.per_instance.compiling.comparison import (
    coefficients,
    compare_perturbed,
    compare_recordings,
    tolerance_of,
)
from deltasam.per_instance.compiling.errors import NewGraphError, NotCompilableError
from deltasam.per_instance.compiling.region import Region, refusal, region_of
from deltasam.per_instance.errors import (
    COMMON,
    InstancesMixedError,
    MisreadError,
    ModelError,
    SizeUnknownError,
    SuspectedMixError,
    UncoveredError,
    is_for_the_caller,
)
from deltasam.per_instance.interception.kept_values import kept_values
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.interception.tensors import PerInstance
from deltasam.per_instance.verification.comparison import CheckResult, Scale, compare
from deltasam.per_instance.verification.diagnosis import NOT_FOUND, diagnose
from deltasam.per_instance.verification.moved_weights import check_perturbed_pass
from deltasam.per_instance.verification.objective_kind import kind_of
from deltasam.per_instance.verification.own_rows import crossed_rows, mixed_rows, rows_have_one_owner
from deltasam.per_instance.verification.unseen_uses import (
    FunctionCall,
    function_calls,
    passes_compare,
    refuse_direct_uses,
)
from deltasam.step.branches import is_recorded
from deltasam.step.gradients import ReentrantError, grad
from deltasam.step.model_buffers import ModelBuffers
from deltasam.step.precision import no_autocast
from deltasam.step.selection import differentiable

Run = Callable[[], Tensor]
Terms = Sequence[tuple[InstanceGradients, Tensor]]

_MOVES_ROWS = "the model moves rows by their content, and those of an instance are not next to each other"
_MOST_SIGNATURES = 4096  # to remember
_ATTEMPTS = 5  # a wrong N, a tiled batch and shared inputs, each corrected once, and one to spare


@dataclass(frozen=True, eq=False)
class Recording:
    r"""Losses and per-instance gradients of one batched pass.

    Attributes:
        losses: :math:`l_i`, shape (N,), detached.
        gradients: The gradients of the groups, as factors.
        norms: Their norms, shape (G,); G = N for groups of one.
        slots: Where the parameters of the model are.
        each: The norms of the gradients of each parameter (``id``), shape (G,), if they were asked for.
        chooses_rows: Whether the model chooses rows by their content, which is tested in every step.
    """

    losses: Tensor
    gradients: InstanceGradients
    norms: Tensor
    slots: ParameterSlots
    each: Mapping[int, Tensor] = field(default_factory=dict)
    chooses_rows: bool = False

    def rounded(self, *, widening: bool = False) -> Recording:
        """The same with output gradients in bfloat16, see :meth:`InstanceGradients.rounded`; norms stay exact."""
        return replace(self, gradients=self.gradients.rounded(widening=widening))

    def for_one_pass(self) -> Recording:
        """The same, to be perturbed with once, see :meth:`InstanceGradients.for_one_pass`; norms stay valid."""
        return replace(self, gradients=self.gradients.for_one_pass())

    def norms_of(self, params: Sequence[Tensor]) -> Tensor:
        """The norms of the gradients of each parameter, shape (K, G); zero for one that took no part."""
        return torch.stack([self.each.get(id(p), torch.zeros_like(self.norms)).to(self.norms) for p in params])

    def mean_losses(self, members: Tensor) -> Tensor:
        """The mean loss of every group, shape (G,), of as many instances."""
        grouping = self.gradients.grouping
        padded = torch.nn.functional.pad(self.losses, (0, grouping.groups * grouping.m - self.losses.shape[0]))
        return padded.view(grouping.groups, grouping.m).sum(1).to(members) / members

    def times(self, params: Sequence[Tensor], factors: Tensor) -> Recording:
        """The same with the gradients of each parameter multiplied by its own factors, shape (K, G)."""
        by_parameter = dict(zip(map(id, params), factors.unbind(0), strict=True))
        return replace(self, gradients=self.gradients.times(by_parameter))

    def only(self, params: Iterable[Tensor]) -> Recording:
        """The same with the gradients of some parameters only; the norms stay those of all."""
        return replace(self, gradients=self.gradients.only(params))

    def perturbed(self, c: Tensor) -> AbstractContextManager[None]:
        r"""The model at :math:`w + c_g \nabla l_g(w)` for every group, c of shape (G,); see :func:`perturbed`."""
        return perturbed(self.slots, [(self.gradients, c)])


def record(
    model: nn.Module,
    run: Run,
    params: Mapping[str, Tensor] | None = None,
    *,
    size: int | None = None,
    group: int = 1,
    scale: Scale | None = None,
    terms: Terms = (),
    objective: Any = None,
    separate: bool = False,
    most: int | None = None,
) -> Recording:
    r"""Per-instance gradients of the losses that ``run()`` returns, from one batched forward and one backward.

    The backward stops at the outputs of the layers: no weight gradient is computed. The first time a model is seen
    with an objective, and whenever an input has k N rows in a new place, the gradients of two groups are compared with
    autograd's, and the loss of one group at perturbed weights with the loss at moved weights. So a use of a weight
    that the engine does not see is detected, not skipped. That costs two more backwards and three forwards. Inputs
    whose rows the model chooses by their content (masked tokens, a sorted batch) are tested in every step.

    The parameters need not require gradients. Memory: the inputs and output gradients of every layer; no gradient or
    copy of the parameters, except of a sample of them in the comparison.

    Args:
        model: The model that ``run`` calls.
        run: Makes one pass and returns the losses, (N,), with their graph; draws the same random numbers every time.
        params: The parameters to differentiate by, by name, trained or frozen; by default all that require gradients.
        size: N; by default the leading dimension of the first tensor that the model is called with.
        group: Number of instances that share a perturbation.
        scale: Loss scaling; it cancels in quantities made from the norms.
        terms: Record at these perturbed weights instead of at w (several ascent steps).
        objective: What ``run`` calls with the model. A new kind of objective is verified anew.
        separate: Keep the gradients of weights and biases apart, with the norms of each, for radii per parameter.
        most: How many bytes of the gradients of matrices to keep at most, where layers can be kept in smaller forms.

    Raises:
        InstancesMixedError: The loss of one instance depends on the others.
        UncoveredError: A parameter is used in a way that no rule covers, or the engine fails where the model alone
            does not.
        ValueError: Two parameters share their memory.
    """
    chosen = params if params is not None else {n: p for n, p in model.named_parameters() if p.requires_grad}
    slots = ParameterSlots(model, {name: p for name, p in chosen.items() if p.numel()})
    kind, given = kind_of(objective), size
    if size is not None and size % (rows := slots.memory.rows.get(kind, 1)) == 0:
        size //= rows
    request = _Request(run, size, group, scale, tuple(terms), kind, separate, most)
    why: MisreadError | None = None
    with slots.memory.corrections():
        for _ in range(_ATTEMPTS):
            try:
                return _attempt(slots, request)
            except MisreadError as misread:
                why = misread.with_traceback(None)  # its frames hold the whole graph
                slots.memory.correct(misread)
                request = replace(request, size=misread.size or request.size)
                if given and misread.size and given % misread.size == 0:
                    slots.memory.rows[kind] = given // misread.size  # else every step would begin with a wrong pass
                continue
            except (InstancesMixedError, UncoveredError, SizeUnknownError, ReentrantError):
                raise
            except ModelError as found:
                raise found.error from found.error.__cause__
            except COMMON as found:
                if is_for_the_caller(found):
                    raise
                error = found.with_traceback(None)
                error.__context__ = error.__cause__ = None
            verdict = diagnose(slots, run, error, why)
            raise verdict from (error if isinstance(verdict, UncoveredError) else None)
        raise UncoveredError(f"{why}; {NOT_FOUND}", list(chosen))


@dataclass(frozen=True)
class _Request:
    """The arguments of :func:`record` that an attempt needs."""

    run: Run
    size: int | None
    group: int
    scale: Scale | None
    terms: tuple[tuple[InstanceGradients, Tensor], ...]
    objective: Hashable
    separate: bool
    most: int | None


def _attempt(slots: ParameterSlots, request: _Request) -> Recording:
    """One recording under the current layouts, compiled if the model is."""
    region = region_of(slots.model, sharded=slots.is_sharded)
    what = (request.objective, tuple(slots.params), bool(request.terms))
    if region is None or what in region.refused:
        return _by_proxies(slots, request)
    if slots.hooked != region.hooked:  # hooks that change a gradient are found by comparing this pass with autograd
        known = _by_proxies(slots, request)
        region.hooked = region.hooked if is_recorded(known.losses.device) else slots.hooked
        return known
    why: Exception | None = NotCompilableError("several ascent steps") if request.terms else None
    try:
        if why is None:
            return _compiled(slots, request, region)
    except NewGraphError:
        known = _by_proxies(slots, request)
        if is_recorded(known.losses.device):  # nothing can be compared, nor compiled
            return known
        try:
            if known.chooses_rows:  # a compiled graph is compared once
                raise NotCompilableError("the model chooses rows by their content") from None
            _compare_compiled(slots, request, region, known)
            return _compiled(slots, request, region)
        except Exception as error:  # noqa: BLE001 (a compiler may raise anything)
            why = refusal(error)
    except Exception as error:  # noqa: BLE001 (as above)
        why = refusal(error)
    assert why is not None
    recording = _by_proxies(slots, request)  # if this fails, too, the error is not the compiler's
    region.refuse(slots.model, what, why)
    return recording


def _compiled(slots: ParameterSlots, request: _Request, region: Region, *, interpreted: bool = False) -> Recording:
    """A recording by the graph of a compiled model."""
    losses, gradients, norms = region.record(
        slots,
        request.run,
        size=request.size,
        group=request.group,
        scale=request.scale,
        objective=request.objective,
        fold=not request.separate,
        interpreted=interpreted,
    )
    slots.compiled = partial(region.perturbed, slots, objective=request.objective, interpreted=interpreted)
    return _recording(slots, request, losses, gradients, norms)


def _compare_compiled(slots: ParameterSlots, request: _Request, region: Region, known: Recording) -> None:
    """Compares the graph of a compiled model, operation by operation, with a recording by proxies."""
    scale = request.scale if request.scale is not None else torch.clone
    tolerance = tolerance_of(known.losses, known.gradients)
    c = coefficients(known.losses, known.norms, scale(torch.ones_like(known.losses[:1])))
    found = []
    try:
        with ModelBuffers(slots.model).rewound():
            mine = _compiled(slots, request, region, interpreted=True)
            compare_recordings((mine.losses, mine.gradients), (known.losses, known.gradients), tolerance)
            for recording in (mine, known):
                with torch.enable_grad(), recording.perturbed(c):
                    found.append(request.run().detach())
                slots.compiled = None  # the second time by proxies
        compare_perturbed(found[0], found[1], known.losses, tolerance)
    finally:
        slots.compiled = None
    region.accept()


def _by_proxies(slots: ParameterSlots, request: _Request) -> Recording:
    """A recording by proxies; a kind of pass that is new is compared with autograd."""
    with differentiable(slots.params):
        return _verified(slots, request)


def _verified(slots: ParameterSlots, request: _Request) -> Recording:
    recording, signature, check, calls = _pass_at_w(slots, request)
    if check is not None:
        comparable = passes_compare(slots, request.run, check, calls)
        if check.is_conclusive:
            if comparable and not request.terms:
                perturb = recording.only(slots.compared.values()).perturbed
                check_perturbed_pass(
                    slots, request.run, recording.losses, recording.norms, check, request.scale, perturb
                )
            if len(slots.memory.verified) > _MOST_SIGNATURES:
                slots.memory.verified.clear()
            slots.memory.verified.add(signature)
    return recording


def _pass_at_w(
    slots: ParameterSlots, request: _Request
) -> tuple[Recording, Hashable, CheckResult | None, Counter[FunctionCall]]:
    """The pass itself, its signature, and if it was compared, the result and the Python functions in its graph."""
    scale, check, calls = request.scale, None, Counter[FunctionCall]()
    with torch.enable_grad(), slots.filled(request.size, request.group, request.terms, recording=True) as current:
        losses = request.run()
        state = current()
        shape = tuple(losses.shape)
        if isinstance(losses, PerInstance):
            why = f"the losses, of shape {shape}, are computed from parameters without the batch"
            raise UncoveredError(f"{why}; {NOT_FOUND}", list(slots.params))
        if shape[0] != state.size:
            why = f"the model was called with {state.size} instances, and losses have the shape {shape}"
            raise MisreadError(why, size=shape[0])
        state.recording = False  # activation checkpointing calls the layers again
        with no_autocast(losses.device):
            total = losses.sum() if scale is None else scale(losses.sum())
            signature = _signature(slots, state, request)
            is_new = signature not in slots.memory.verified and not is_recorded(losses.device)
            state.note_losses(losses, request.objective)
            moved = _rows_moved(state, losses, scale)
            must_loop = moved is not None and _must_loop(slots, moved)
            is_new = is_new or must_loop  # the comparison may find a layout that is right
            edges = [call.edge for call in state.calls]
            found: list[Tensor | None] = []  # which collect empties
            if edges:
                found.extend(grad(total, edges, retain_graph=is_new, allow_unused=True))
            gradients = collect(
                state.calls,
                found,
                state.grouping,
                losses.device,
                fold=not request.separate,
                most=request.most,
                together=state.together,
                frozen={id(slots.params[name]) for name in slots.frozen},
                empty=not is_new,
            )
            if is_new:
                slots.memory.kept |= kept_values(slots.model)
                refuse_direct_uses(slots, losses, state)
                calls = function_calls(losses)
                try:
                    check = compare(slots, losses, state, found, gradients, scale)
                except SuspectedMixError:
                    if not must_loop or not rows_have_one_owner(state, losses, scale):
                        raise
            if must_loop:
                chosen = [name for number, name in slots.names.items() if number in state.chosen]
                raise UncoveredError(_MOVES_ROWS, chosen or list(slots.params))
    norms = gradients.norms()
    if moved is not None and is_recorded(losses.device):
        norms = norms.masked_fill(moved, torch.nan)  # a replay cannot loop: it leaves out its perturbation
    recording = _recording(slots, request, losses.detach(), gradients, norms)
    return replace(recording, chooses_rows=bool(state.chosen or state.crossings)), signature, check, calls


def _rows_moved(state: PassState, losses: Tensor, scale: Scale | None) -> Tensor | None:
    """Whether rows are not where their layout says, as a tensor of the device; None if none can have moved."""
    crossed = crossed_rows(state) if state.crossings else None
    mixed = mixed_rows(state, losses, scale) if state.chosen else None
    if crossed is None or mixed is None:
        return mixed if crossed is None else crossed
    return crossed.to(mixed.device) | mixed


def _must_loop(slots: ParameterSlots, moved: Tensor) -> bool:
    """Whether this pass moves rows; while nothing can be read from the device, raises if an earlier one did."""
    if is_recorded(moved.device):
        if slots.memory.mixes_rows:
            raise UncoveredError(_MOVES_ROWS, list(slots.params))
        return False
    must = bool(moved)
    slots.memory.mixes_rows |= must
    return must


def _recording(
    slots: ParameterSlots, request: _Request, losses: Tensor, gradients: InstanceGradients, norms: Tensor
) -> Recording:
    if norms.device.type == "cpu" and not bool(torch.isfinite(norms).all()):
        # 0 * inf is not 0. On other devices this test would synchronise, and the plain gradient of such a batch is
        # not finite either.
        gradients = gradients.without(~torch.isfinite(norms))
    each = gradients.norms_of_each() if request.separate else {}
    return Recording(losses, gradients, norms, slots, each)


def _signature(slots: ParameterSlots, state: PassState, request: _Request) -> Hashable:
    """What a comparison with autograd is valid for.

    One group alone has the right gradient under every layout. In half precision less can be compared. In training mode
    a model may do what it does not in evaluation: mix its instances.
    """
    grouping = state.grouping
    m = grouping.m if grouping.groups > 1 else 0
    seen = frozenset(state.layout_table.seen.items())
    # A place in the table does not name the parameters that were written out for it.
    written_out = frozenset(slots.names[id(call.weight)] for call in state.calls if call.form == "dense")
    return (
        tuple(slots.params),
        seen,
        written_out,
        tuple(slots.hooked.items()),
        slots.modes,
        m,
        bool(request.terms),
        request.objective,
        state.is_half,
    )


@contextmanager
def perturbed(slots: ParameterSlots, terms: Terms) -> Iterator[None]:
    r"""The model computes with :math:`w + \sum_k c_{kg} \nabla_k l_g` for every group g of the batch.

    Plain autograd then gives :math:`\nabla \frac1N \sum_i l_i(w + \epsilon_i)`. The weights themselves are never
    written. Keep the context open during ``backward`` if activation checkpointing is on.
    """
    if slots.compiled is not None:
        with slots.compiled(terms):
            yield
        return
    grouping = terms[0][0].grouping
    with slots.filled(grouping.size, grouping.m, terms, recording=False):
        yield
