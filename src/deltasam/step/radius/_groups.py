"""Radii for groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasam.step.radius._base import Climb, Number, Radius, Sizes
from deltasam.step.selection import kinds_of

Key = str | Callable[[str, nn.Parameter], bool]

REST = "rest"


@dataclass(frozen=True)
class Groups(Radius):
    r"""A radius for every group of parameters: ``rho={"embeddings": 0, "norms": 0.002, "rest": 0.01}``.

    .. math:: \epsilon_G = \rho_G\, \nabla_G l / \lVert \nabla_G l \rVert_2

    Each group has its own norm, so its perturbation has exactly the radius that is given. (Optimizers with ``rho`` in
    their parameter groups divide by the norm of all gradients instead.) A radius may be a number or a rule; 0 leaves
    the group where it is.

    A key is a kind of parameter (``"embeddings"``, ``"norms"``, ``"biases"``, ``"adapters"``, ``"base"``), a pattern
    of names (``"classifier*"``, ``"*.layer.11.*"``), a predicate ``(name, parameter) -> bool``, or ``"rest"``. A
    parameter belongs to the first key that fits.

    Cost: one more copy of the direction for a moment.

    Attributes:
        groups: Pairs of a key and a radius.

    Example:
        >>> from deltasam import SAM
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> method = SAM(rho={"norms": 0.0, "*bias": 0.1, "rest": 0.2})
        >>> step = method.backward(model, torch.ones(4, 2), lambda model, x: model(x).squeeze(-1) ** 2)
        >>> round(float(step.radius) ** 2, 4)  # 0.1 ** 2 + 0.2 ** 2
        0.05
    """

    groups: tuple[tuple[Key, Radius], ...]

    @property
    def needs_gradient(self) -> bool:  # type: ignore[override]
        """Whether one of the rules does."""
        return any(rule.needs_gradient for _, rule in self.groups)

    def radius_of(self, climb: Climb) -> Number:
        """Not defined: each group has its own."""
        raise ValueError(
            "rho has a value for each group of parameters, and this method needs one for all: give a number"
        )

    def is_per_parameter(self) -> bool:
        """Always."""
        return True

    def sizes(self, climb: Climb) -> Sizes:
        """One number per parameter."""
        members = self.members(climb.model, climb.names, climb.params)
        each = climb.direction_norm_of_each()
        rows: list[Any] = [None] * len(climb.names)
        squares = torch.zeros_like(climb.norm)
        for rule, chosen in members:
            if rule.is_zero():
                found = Sizes(torch.zeros_like(climb.norm), torch.zeros_like(climb.norm))
            else:
                found = rule.sizes(climb.only(chosen))
            for k, index in enumerate(chosen):
                row = found.steps[k] if found.per_parameter else found.steps
                rows[index] = torch.where(torch.isfinite(climb.norm), row, torch.zeros_like(row)).to(each.dtype)
            squares = squares + torch.where(torch.isfinite(climb.norm), found.radius, 0).square()
        return Sizes(torch.stack(rows), squares.sqrt())

    def members(self, model: nn.Module, names: Any, params: Any) -> list[tuple[Radius, list[int]]]:
        """The rules in use, with the indices of their parameters.

        Raises:
            ValueError: A parameter belongs to no group.
        """
        known = _MEMBERS.setdefault(model, {})
        wanted = (tuple(key for key, _ in self.groups), tuple(names))
        if wanted not in known:
            known[wanted] = _assigned(model, wanted[0], names, params)
        groups = known[wanted]
        used = [(number, rule) for number, (_, rule) in enumerate(self.groups) if number in groups]
        return [(rule, [k for k, group in enumerate(groups) if group == number]) for number, rule in used]

    def scaled(self, factor: Number) -> Groups:
        """Scales every radius."""
        return Groups(tuple((key, rule.scaled(factor)) for key, rule in self.groups))

    def at(self, progress: Any) -> Groups:
        """The rules at one point of the training."""
        return Groups(tuple((key, rule.at(progress)) for key, rule in self.groups))

    def numbers(self) -> tuple[Number, ...]:
        """The numbers of all rules."""
        return tuple(number for _, rule in self.groups for number in rule.numbers())

    def structure(self) -> Hashable:
        """The keys, and the structures of the rules."""
        return (Groups, *((key, rule.structure()) for key, rule in self.groups))

    def with_numbers(self, numbers: Iterator[Number]) -> Groups:
        """The rules with other numbers."""
        return Groups(tuple((key, rule.with_numbers(numbers)) for key, rule in self.groups))


_MEMBERS: WeakKeyDictionary[nn.Module, dict[Any, list[int]]] = WeakKeyDictionary()


def _assigned(model: nn.Module, keys: tuple[Key, ...], names: Any, params: Any) -> list[int]:
    kinds = kinds_of(model)
    found = []
    for name, p in zip(names, params, strict=True):
        fits = [k for k, key in enumerate(keys) if _fits(key, name, p, kinds)]
        if not fits:
            raise ValueError(f"rho has no group for {name!r}: add 'rest', or a pattern that fits it")
        found.append(fits[0])
    return found


def _fits(key: Key, name: str, p: Tensor, kinds: Mapping[str, set[int]]) -> bool:
    if callable(key):
        return bool(key(name, p))  # type: ignore[arg-type]
    if key == REST:
        return True
    return id(p) in kinds[key] if key in kinds else fnmatchcase(name, key)
