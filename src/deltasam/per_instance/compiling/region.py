"""A compiled model whose calls are recorded or perturbed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from deltasam._torch import (
    any_compiled,
    call_uncompiled,
    compiled_call,
    is_compiler_loaded,
    replays_graphs,
    uncompiled,
)
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.compiling.errors import NewGraphError, NotCompilableError
from deltasam.per_instance.compiling.flat import flatten
from deltasam.per_instance.compiling.graph import Backend, Recorded, TracedGraph
from deltasam.per_instance.errors import MisreadError, first_line, is_for_the_caller
from deltasam.per_instance.interception.memory import warn_once
from deltasam.per_instance.interception.slots import ParameterSlots, leading
from deltasam.step.gradients import grad
from deltasam.step.precision import no_autocast

UNCOMPILED = "the per-instance passes of this compiled model run uncompiled"

Terms = Sequence[tuple[InstanceGradients, Tensor]]
Scale = Callable[[Tensor], Tensor]
Pass = Callable[[TracedGraph, tuple[Any, ...]], tuple[Any, ...]]


class Region:
    """The compiled call of one model.

    It keeps no reference to the model, whose life it would prolong.
    """

    def __init__(self, backend: Backend) -> None:
        self.refused: set[Hashable] = set()  # what does not run compiled: kinds of objectives with parameters
        self.hooked: dict[str, tuple[int, ...]] = {}  # parameters with hooks, with which a pass was compared
        self.backend = backend
        self._pass: Pass | None = None
        self._candidate: tuple[TracedGraph, Hashable] | None = None
        # A code object of its own: torch counts compilations, and looks for compiled code, by code object.
        call = FunctionType(call_uncompiled.__code__.replace(), call_uncompiled.__globals__, "compiled_call")
        self._call = torch.compile(call, backend=self._traced, fullgraph=True, dynamic=False)

    def _traced(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Called by torch with a new graph; returns what runs in its place."""
        if not all(isinstance(value, Tensor) for value in inputs):
            raise NotCompilableError("the graph depends on numbers that change from call to call")
        graph = TracedGraph(module, self.backend)

        def run(*inputs: Any) -> tuple[Any, ...]:
            assert self._pass is not None
            return self._pass(graph, inputs)

        return run

    @contextmanager
    def _calls_go_to(
        self,
        model: nn.Module,
        open_pass: Callable[[Any], Pass],
        uncompiled: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> Iterator[None]:
        """Calls of the model inside run the pass that ``open_pass(arguments)`` returns.

        With a new graph the model runs in the context ``uncompiled(why)`` instead, if it is given.
        """
        place = compiled_call(model)
        assert place is not None
        own = place.attributes[place.name]

        def call(*args: Any, **kwargs: Any) -> Any:
            self._pass = open_pass([*args, *kwargs.values()])
            try:
                return self._call(place.inner, args, kwargs)
            except NewGraphError as why:
                if uncompiled is None:
                    raise
                with uncompiled(str(why)):
                    return call_uncompiled(place.inner, args, kwargs)
            finally:
                self._pass = None

        place.attributes[place.name] = call
        try:
            yield
        finally:
            place.attributes[place.name] = own

    def record(
        self,
        slots: ParameterSlots,
        run: Callable[[], Tensor],
        *,
        size: int | None,
        group: int,
        scale: Scale | None,
        objective: Hashable,
        fold: bool,
        interpreted: bool = False,
    ) -> tuple[Tensor, InstanceGradients, Tensor]:
        """Losses, gradients of the groups at w, and their norms, see :func:`deltasam.per_instance.recording.record`.

        Raises:
            NewGraphError: The graph was not compared with the proxies yet, and the pass is not an interpreted one.
            NotCompilableError: The graph has an operation without a rule.
        """
        if replays_graphs(self.backend):
            raise NotCompilableError(
                "torch.compile replays CUDA graphs in this mode; use the default one, and Captured"
            )
        found: list[Recorded] = []
        groupings: list[Grouping] = []
        table = slots.memory.layout_table

        def open_pass(arguments: Any) -> Pass:
            count = size if size is not None else max(1, leading(arguments))
            groupings.append(Grouping(count, min(group, count)))
            return pass_at_w

        def pass_at_w(graph: TracedGraph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if found:
                raise NotCompilableError("the objective calls the model several times")
            trust = self._trust(slots, groupings[0].m, objective)
            self._candidate = (graph, trust)
            if not interpreted and trust not in graph.trusted:
                raise NewGraphError
            outputs, recorded = graph.record(inputs, slots.names, groupings[0], table, interpreted=interpreted)
            found.append(recorded)
            return outputs

        with torch.enable_grad(), self._calls_go_to(slots.model, open_pass):
            losses = run()
            if not found:
                raise NotCompilableError("the objective does not call the compiled model, or runs it uncompiled")
            grouping = groupings[0]
            if losses.shape[0] != grouping.size:
                raise MisreadError("the number of losses is not that of the instances", size=int(losses.shape[0]))
            with no_autocast(losses.device):
                total = losses.sum() if scale is None else scale(losses.sum())
                taps = found[0].taps
                gradients = grad(total, taps, allow_unused=True) if taps else ()
                collected, norms = found[0].collect(gradients, slots.params, slots.names, fold)
        return losses.detach(), collected, norms

    @contextmanager
    def perturbed(
        self, slots: ParameterSlots, terms: Terms, *, objective: Hashable, interpreted: bool = False
    ) -> Iterator[None]:
        """The model computes with w + eps_g for every group, see :func:`deltasam.per_instance.recording.perturbed`."""
        tensors, description = flatten(terms, slots.names)
        table, trust = slots.memory.layout_table, self._trust(slots, description.grouping.m, objective)

        def perturbed(graph: TracedGraph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if not interpreted and trust not in graph.trusted:
                raise NewGraphError("the model was recorded with another kind of input, or in another mode")
            return graph.perturbed(inputs, slots.names, tensors, description, table, interpreted=interpreted)

        def by_proxies(why: str) -> AbstractContextManager[Any]:
            warn_once(slots.model, f"{UNCOMPILED}: {why}")
            return slots.filled(description.grouping.size, description.grouping.m, terms, recording=False)

        with self._calls_go_to(slots.model, lambda _: perturbed, by_proxies):
            yield

    def refuse(self, model: nn.Module, what: Hashable, why: Exception) -> None:
        """Warns that such passes run uncompiled. Only a further shape is tried again: known ones stay compiled."""
        if type(why).__name__ != "FailOnRecompileLimitHit":
            self.refused.add(what)
            reason = first_line(why) if isinstance(why, NotCompilableError) else f"{type(why).__name__}: {why}"
        else:
            reason = "too many shapes (torch._dynamo.config.recompile_limit); PadToBuckets makes them few"
        warn_once(model, f"{UNCOMPILED}: {reason}")

    def accept(self) -> None:
        """The graph of the last recording agrees with the proxies: from now on it runs compiled."""
        assert self._candidate is not None
        graph, trust = self._candidate
        graph.trusted.add(trust)

    def _trust(self, slots: ParameterSlots, group: int, objective: Hashable) -> Hashable:
        """What a comparison of a graph with the proxies is valid for."""
        table = slots.memory.layout_table
        return tuple(slots.params), group, objective, table.tiled, frozenset(table.shared)


def refusal(error: Exception) -> Exception:
    """The error as the reason why a pass runs uncompiled; raised again if it is not one."""
    if isinstance(error, MisreadError) or is_for_the_caller(error):
        raise error
    found: BaseException | None = error
    while found is not None:  # torch wraps errors of its backends
        if isinstance(found, NotCompilableError):
            return NotCompilableError(str(found))
        found = found.__cause__
    return error.with_traceback(None)


_REGIONS: WeakKeyDictionary[nn.Module, Region] = WeakKeyDictionary()
_LOOKED_AT: WeakSet[nn.Module] = WeakSet()  # not compiled as a whole; a walk over the modules in every step takes long


def region_of(model: nn.Module, *, sharded: bool = False) -> Region | None:
    """The compiled call of a model; None, with a warning if there is something compiled, if it has none."""
    if not is_compiler_loaded():
        return None
    place = None if sharded else compiled_call(model)
    if place is None:
        if model not in _LOOKED_AT and any_compiled(model.modules()):
            why = (
                "its parameters are gathered outside of the graph (fully_shard)" if sharded
                else "compile the whole model (torch.compile(model)), not parts of it"
            )  # fmt: skip
            warn_once(model, f"{UNCOMPILED}: {why}")
        _LOOKED_AT.add(model)
        return None
    known = _REGIONS.get(model)
    if known is None or known.backend is not place.backend:
        known = _REGIONS[model] = Region(place.backend)
    return known


def warn_about_wrapper(model: nn.Module, inner: nn.Module) -> None:
    """Warns if what was compiled is a wrapper (DDP) around the model, whose own calls are not compiled then."""
    if model is not inner and is_compiler_loaded() and compiled_call(model) is not None:
        remedy = "compile the model inside: DistributedDataParallel(torch.compile(model))"
        warn_once(inner, f"{UNCOMPILED}: {type(uncompiled(model)).__name__} was compiled; {remedy}")
