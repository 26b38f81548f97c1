"""The factors and norms that follow from a recording, compiled: dozens of norms and products in few kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltasam.per_instance.algebra.gradient import InstanceGradients, collect
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.operations import compiling
from deltasam.per_instance.compiling.flat import Description, flatten, tensors_of
from deltasam.per_instance.compiling.interpreter import PlannedCall

Compile = Callable[[Callable[..., Any], list[Any], int], Callable[..., Any]]


def collected(
    calls: Sequence[PlannedCall],
    inputs: Sequence[Tensor],
    found: Sequence[Tensor | None],
    params: Mapping[str, Tensor],
    grouping: Grouping,
    *,
    fold: bool,
) -> tuple[InstanceGradients, Tensor]:
    """The gradients of the groups, from the inputs of the calls and the gradients of their outputs, and the norms."""
    device = next((d.device for d in found if d is not None), torch.device("cpu"))
    made = [call.call(params, inputs) for call in calls]
    together = {id(call.weight) for call in made}  # the graph adds products, it has no matrices per group
    gradients = collect(made, list(found), grouping, device, fold=fold, together=together)
    return gradients, gradients.norms()


class Collector:
    """:func:`collected` for one recording; compiled in its first call.

    A factor may be an input itself; such tensors are not results of the compiled function.
    """

    def __init__(self, calls: Sequence[PlannedCall], grouping: Grouping, *, fold: bool) -> None:
        self._calls, self._grouping, self._fold = calls, grouping, fold
        self._function: Callable[..., Any] | None = None
        self._places: list[tuple[bool, int]] = []  # of every tensor of the result: an input or an output, its number
        self._description: Description | None = None
        self._params: list[Mapping[str, Tensor]] = []  # during a call only: it must not keep the model alive

    def __call__(
        self,
        inputs: Sequence[Tensor],
        found: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        names: Mapping[int, str],
        compile_: Compile,
    ) -> tuple[InstanceGradients, Tensor]:
        """The gradients and their norms."""
        given = [*inputs, *(d for d in found if d is not None)]
        self._params.append(params)
        try:
            if self._function is None:
                self._function = self._compiled(inputs, found, params, names, compile_, given)
            results = self._function(*given)
        finally:
            self._params.clear()
        assert self._description is not None
        tensors = [given[k] if is_input else results[k] for is_input, k in self._places]
        return self._description.gradients(tensors, params, given[-1].device), results[-1]

    def _compiled(
        self,
        inputs: Sequence[Tensor],
        found: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        names: Mapping[int, str],
        compile_: Compile,
        given: list[Tensor],
    ) -> Callable[..., Any]:
        calls, grouping, fold, count = self._calls, self._grouping, self._fold, len(inputs)
        present = [d is not None for d in found]
        gradients, norms = collected(calls, inputs, found, params, grouping, fold=fold)
        _, self._description = flatten([(gradients, norms)], names)
        numbers: dict[int, tuple[bool, int]] = {id(tensor): (True, k) for k, tensor in enumerate(given)}
        wanted: list[int] = []  # the first of equal tensors
        self._places = []
        for k, tensor in enumerate(tensors_of(gradients)):
            if id(tensor) not in numbers:
                numbers[id(tensor)] = (False, len(wanted))
                wanted.append(k)
            self._places.append(numbers[id(tensor)])
        known = self._params

        def function(*values: Any) -> tuple[Any, ...]:
            rest = iter(values[count:])
            ds = [next(rest) if is_there else None for is_there in present]
            with compiling():
                made, norms = collected(calls, values[:count], ds, known[0], grouping, fold=fold)
            tensors = tensors_of(made)
            return (*(tensors[k] for k in wanted), norms)

        return compile_(function, given, len(wanted) + 1)
