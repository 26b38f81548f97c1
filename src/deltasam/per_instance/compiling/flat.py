"""Perturbations as a list of tensors, which a compiled function takes, and a description of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltasam.per_instance.algebra.factors import Dense, Factor, LowRank, Packed, Rows
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.perturbation import Perturbation

Terms = Sequence[tuple[InstanceGradients, Tensor]]


class _Part(NamedTuple):
    """A factor of a parameter without its tensors, which are given by their numbers."""

    name: str
    kind: type[Factor]
    tensors: tuple[int, ...]
    rest: tuple[Any, ...]
    coefficients: int

    def factor(self, tensors: list[Tensor]) -> Factor:
        """The factor with these tensors."""
        make: Any = self.kind
        made: Factor = make(*tensors, *self.rest)
        return made


class Description(NamedTuple):
    """Everything about the perturbations of a pass that is not a tensor; equal ones share a compiled function."""

    grouping: Grouping
    parts: tuple[_Part, ...]
    vectors: tuple[str, ...]

    def perturbation(self, tensors: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Perturbation:
        """The perturbation made of these tensors, of the weights by name."""
        terms: dict[int, list[tuple[Factor, Tensor]]] = {}
        for part in self.parts:
            if part.name in weights:  # a part of a model that was not called has no weights in the graph
                made = part.factor([tensors[k] for k in part.tensors])
                terms.setdefault(id(weights[part.name]), []).append((made, tensors[part.coefficients]))
        vectors = {id(weights[name]): weights[name] for name in self.vectors if name in weights}
        return Perturbation(self.grouping, terms, vectors)

    def gradients(
        self, tensors: Sequence[Tensor], params: Mapping[str, Tensor], device: torch.device
    ) -> InstanceGradients:
        """The gradients made of these tensors, in the order of :func:`tensors_of`."""
        rest = iter(tensors)
        factors: dict[int, list[Factor]] = {}
        for part in self.parts:
            made = part.factor([next(rest) for _ in part.tensors])
            factors.setdefault(id(params[part.name]), []).append(made)
        vectors = {id(params[name]): params[name] for name in self.vectors}
        return InstanceGradients(self.grouping, factors, vectors, device)


def tensors_of(gradients: InstanceGradients) -> list[Tensor]:
    """The tensors of all factors, one after the other."""
    return [tensor for factors in gradients.factors.values() for factor in factors for tensor in _split(factor)[0]]


def flatten(terms: Terms, names: Mapping[int, str]) -> tuple[list[Tensor], Description]:
    """The tensors of ``terms``, each once, and the rest; ``names`` are those of the parameters by ``id``."""
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def number(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return numbers[id(tensor)]

    parts: list[_Part] = []
    for gradients, c in terms:
        for name, factors in gradients.factors.items():
            for factor in factors:
                own, rest = _split(factor)
                parts.append(_Part(names[name], type(factor), tuple(map(number, own)), rest, number(c)))
    vectors = tuple(names[name] for name in terms[0][0].vectors) if len(terms) == 1 else ()
    return tensors, Description(terms[0][0].grouping, tuple(parts), vectors)


def _split(factor: Factor) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The tensors of a factor, and its other fields, in the order of its fields."""
    match factor:
        case LowRank():
            return (factor.x, factor.d), (factor.bias, factor.transposed)
        case Rows():
            return (factor.ids, factor.d), (factor.rows,)
        case Packed():
            return (factor.pack,), (factor.start, torch.Size(factor.shape))
        case Dense():
            return (factor.value,), ()
