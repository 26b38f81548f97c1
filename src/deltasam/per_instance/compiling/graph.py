"""The graph of a model for one kind of input, and the functions that the compiler makes of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.operations import compiling
from deltasam.per_instance.compiling.collector import Collector, collected
from deltasam.per_instance.compiling.errors import NewGraphError
from deltasam.per_instance.compiling.flat import Description
from deltasam.per_instance.compiling.interpreter import InstanceInterpreter, PlannedCall
from deltasam.per_instance.errors import first_line
from deltasam.per_instance.interception.batch_rule import LayoutTable

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
Function = Callable[..., Any]


@dataclass
class Recorder:
    """A recording of one graph: the calls, and taps whose gradients are those of the outputs of the calls."""

    calls: list[PlannedCall]
    taps: list[Tensor]
    outputs: int  # of the model
    inputs: int  # of the calls
    function: Function | None = None
    collectors: dict[Hashable, Collector] = field(default_factory=dict)


@dataclass
class Recorded:
    """What a recording found: taps to differentiate by, and ``collect(gradients of the taps, params, names, fold)``.

    That returns the gradients of the groups, and their norms.
    """

    taps: list[Tensor]
    collect: Callable[..., tuple[InstanceGradients, Tensor]]


@dataclass(eq=False)
class TracedGraph:
    """What ``torch.compile`` traced.

    Attributes:
        module: The graph.
        backend: The compiler.
        trusted: What was compared with the proxies: names of parameters, grouping, layouts, kind of objective.
    """

    module: GraphModule
    backend: Backend
    trusted: set[Hashable] = field(default_factory=set)
    _recorders: dict[Hashable, Recorder] = field(default_factory=dict)
    _perturbed: dict[Hashable, Function | NewGraphError] = field(default_factory=dict)

    def record(
        self,
        inputs: Sequence[Any],
        names: Mapping[int, str],
        grouping: Grouping,
        table: LayoutTable,
        *,
        interpreted: bool,
    ) -> tuple[tuple[Any, ...], Recorded]:
        """The outputs of the model at w, and the calls.

        ``interpreted`` passes run the graph operation by operation; others run what the compiler makes of it.
        """
        selected, key = _selected(inputs, names, grouping, table)
        constant = frozenset(k for k, value in enumerate(inputs) if isinstance(value, nn.Parameter))
        if interpreted:
            run = InstanceInterpreter(self.module, selected, grouping, table, constant=constant)
            outputs = run.run_pass(inputs)
            self._recorders[key] = Recorder(run.calls, run.taps, len(outputs), len(run.inputs))

            def plainly(
                found: Sequence[Tensor | None], params: Mapping[str, Tensor], names: Mapping[int, str], fold: bool
            ) -> tuple[InstanceGradients, Tensor]:
                return collected(run.calls, run.inputs, found, params, grouping, fold=fold)

            return outputs, Recorded(run.taps, plainly)
        recorder = self._recorders[key]
        if recorder.function is None:

            def recording(*values: Any) -> tuple[Any, ...]:
                own, taps = values[: len(inputs)], values[len(inputs) :]
                run = InstanceInterpreter(self.module, selected, grouping, table, constant=constant, taps=taps)
                with compiling():
                    return (*run.run_pass(own), *run.inputs)

            results = recorder.outputs + recorder.inputs
            recorder.function = self._compiled(recording, [*inputs, *recorder.taps], results)
        found = recorder.function(*inputs, *recorder.taps)
        outputs, own = tuple(found[: recorder.outputs]), found[recorder.outputs :]

        def compiled(
            found: Sequence[Tensor | None], params: Mapping[str, Tensor], names: Mapping[int, str], fold: bool
        ) -> tuple[InstanceGradients, Tensor]:
            if all(d is None for d in found):
                return collected(recorder.calls, own, found, params, grouping, fold=fold)
            key = (fold, *(d is None for d in found))
            if key not in recorder.collectors:
                recorder.collectors[key] = Collector(recorder.calls, grouping, fold=fold)
            return recorder.collectors[key](own, found, params, names, self._compiled)

        return outputs, Recorded(recorder.taps, compiled)

    def perturbed(
        self,
        inputs: Sequence[Any],
        names: Mapping[int, str],
        tensors: Sequence[Tensor],
        description: Description,
        table: LayoutTable,
        *,
        interpreted: bool,
    ) -> tuple[Any, ...]:
        """The outputs of the model at w + eps_i."""
        grouping = description.grouping
        selected, key = _selected(inputs, names, grouping, table)

        def perturbed(*values: Any) -> tuple[Any, ...]:
            own, factors = values[: len(inputs)], values[len(inputs) :]
            run = InstanceInterpreter(
                self.module, selected, grouping, table, perturb=lambda w: description.perturbation(factors, w)
            )
            with compiling():
                return run.run_pass(own)

        if interpreted:
            return perturbed(*inputs, *tensors)
        key = (key, description, tuple((t.shape, t.dtype, t.stride()) for t in tensors))
        if key not in self._perturbed:
            results = len(next(iter(self.module.graph.find_nodes(op="output"))).args[0])
            try:
                self._perturbed[key] = self._compiled(perturbed, [*inputs, *tensors], results)
            except Exception as error:  # noqa: BLE001 (a compiler may raise anything)
                self._perturbed[key] = NewGraphError(f"{type(error).__name__}: {first_line(error)}")
        function = self._perturbed[key]
        if isinstance(function, NewGraphError):
            raise function.with_traceback(None)
        return tuple(function(*inputs, *tensors))

    def _compiled(self, function: Function, inputs: list[Any], results: int) -> Function:
        """What the compiler makes of a function, as a graph of one node: it traces the function itself."""
        graph = Graph()
        given = [graph.placeholder(f"given_{k}") for k in range(len(inputs))]
        found = graph.call_function(function, tuple(given))
        graph.output(tuple(graph.call_function(operator.getitem, (found, k)) for k in range(results)))
        return self.backend(GraphModule(nn.Module(), graph), inputs)


def _selected(
    inputs: Sequence[Any], names: Mapping[int, str], grouping: Grouping, table: LayoutTable
) -> tuple[dict[int, str], Hashable]:
    """The perturbed parameters by the number of the input that they are, and what a function is compiled for."""
    selected = {k: names[id(value)] for k, value in enumerate(inputs) if id(value) in names}
    return selected, (tuple(selected.items()), grouping, table.tiled, frozenset(table.shared))
