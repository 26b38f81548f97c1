"""What a rule for the radius is, and what it may ask about the ascent that it sizes."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from deltasam.step.branches import is_recorded
from deltasam.step.checks import readable
from deltasam.step.norms import global_norm, step_size, tensor_norms
from deltasam.step.quantized import layer_of
from deltasam.step.radius._progress import Progress

Self = TypeVar("Self", bound="Radius")
Number = float | Tensor  # a tensor while a step is recorded: a replay reads the value of its own step


@dataclass(frozen=True, eq=False)
class Climb:
    r"""The ascent whose size is wanted, of a batch, or of each of its G groups of instances.

    Attributes:
        norm: The norm of the direction that the step is divided by, shape () or (G,), with the loss scale.
        model: The model.
        names: The names of the K parameters that move.
        params: These parameters.
        scale: Returns the factor that the direction carries: the gradient itself has the norm ``norm / scale()``.
        norm_of_each: Returns the norm of the direction of each parameter, shape (K,) or (K, G).
        loss: Returns the loss that the direction is the gradient of, shape () or (G,); None if it is no gradient.
    """

    norm: Tensor
    model: nn.Module
    names: Sequence[str]
    params: Sequence[Tensor]
    scale: Callable[[], Number] = lambda: 1.0
    norm_of_each: Callable[[], Tensor] | None = None
    loss: Callable[[], Tensor] | None = None

    @property
    def slope(self) -> Tensor:
        """The norm of the gradient, without the loss scale: how much the loss rises per unit of the radius."""
        return self.norm / self.scale()

    def weight_norm(self) -> Tensor:
        """The norm of all parameters that move."""
        self._require_values()
        return global_norm([p.detach() for p in self.params]).to(self.norm.device)

    def weight_norm_of_each(self) -> Tensor:
        """The norms of the parameters that move, shape (K,)."""
        self._require_values()
        return tensor_norms([p.detach() for p in self.params]).to(self.norm.device)

    def direction_norm_of_each(self) -> Tensor:
        """The norms of the direction of each parameter, shape (K,) or (K, G).

        Raises:
            ValueError: The direction is noise that is drawn while it is added.
        """
        if self.norm_of_each is None:
            raise ValueError("noise in proportion to the rows has no radius per tensor or group: give rho as a number")
        return self.norm_of_each().to(self.norm.device)

    def only(self, chosen: Sequence[int]) -> Climb:
        """The ascent of some of the parameters alone."""
        norms = self.direction_norm_of_each()
        each = torch.stack([norms[k] for k in chosen])  # no tensor of indices, which a recording could not copy
        return replace(
            self,
            norm=torch.linalg.vector_norm(each, dim=0).to(self.norm.dtype),
            names=[self.names[k] for k in chosen],
            params=[self.params[k] for k in chosen],
            norm_of_each=lambda: each,
        )

    def _require_values(self) -> None:
        for name, p in zip(self.names, self.params, strict=True):
            if layer_of(p) is not None:
                raise ValueError(
                    f"rho is relative to the weights, and the norm of {name!r} is not known, because it is quantized: "
                    "use a number, or LossBudget(...)"
                )


@dataclass(frozen=True, eq=False)
class Sizes:
    """The sizes of one ascent.

    Attributes:
        steps: What the direction is multiplied with: one number, shape () or (G,), or one per parameter, (K,) or
            (K, G). Zero where there is no usable direction.
        radius: The norm of the perturbation, shape () or (G,), in the norm of the method.
    """

    steps: Tensor
    radius: Tensor

    @property
    def per_parameter(self) -> bool:
        """Whether every parameter has its own size."""
        return self.steps.ndim > self.radius.ndim


def sizes_of(rho: Number, norm: Tensor, *, on_the_host: bool = False) -> Sizes:
    """The sizes of an ascent with the radius rho along a direction with this norm, shape () or (G,).

    ``on_the_host``: the norm can be read.
    """
    if on_the_host and norm.ndim == 0 and isinstance(rho, (int, float)) and not is_recorded(norm.device):
        return _sizes_on_the_host(rho, norm)
    steps = step_size(rho, norm)
    # Where the norm is not finite the step is zero, and so is the radius.
    return Sizes(steps, (steps * norm).nan_to_num(0.0, math.inf, -math.inf).abs())


def _sizes_on_the_host(rho: float, norm: Tensor) -> Sizes:
    """The same in numbers of Python: seven small kernels less."""
    value, largest = float(norm), torch.finfo(norm.dtype).max
    inverse = 1 / value if value else math.inf
    step = rho * inverse if inverse <= largest else 0.0
    step = step if abs(step) <= largest else 0.0  # not if it is nan
    radius = abs(step * value) if step else 0.0
    steps = torch.scalar_tensor(step, dtype=norm.dtype, device="cpu")
    return Sizes(steps, torch.scalar_tensor(radius, dtype=norm.dtype, device="cpu"))


class Radius(ABC):
    """A rule that gives the radius of every step. Rules are frozen dataclasses; numbers in them may be tensors."""

    #: Whether the rule needs the gradient at w, which not every method computes.
    needs_gradient: ClassVar[bool] = False

    @abstractmethod
    def radius_of(self, climb: Climb) -> Number:
        """Rho of this ascent."""

    @abstractmethod
    def scaled(self: Self, factor: Number) -> Self:
        """The same rule for perturbations that are ``factor`` times as large."""

    def sizes(self, climb: Climb) -> Sizes:
        """The sizes of the ascent: by default one number, rho over the norm."""
        return sizes_of(self.radius_of(climb), climb.norm, on_the_host=readable(climb.norm))

    def is_zero(self) -> bool:
        """Whether nothing is perturbed, so that the step is plain training."""
        numbers = self.numbers()
        return bool(numbers) and all(isinstance(value, (int, float)) and value == 0 for value in numbers)

    def is_per_parameter(self) -> bool:
        """Whether parameters have their own sizes."""
        return False

    def bound(self, params: Sequence[Tensor], names: Sequence[str], model: nn.Module) -> Number:
        """rho, for a method that needs it without an ascent."""
        one = torch.ones((), device=next((p.device for p in params if not p.is_meta), torch.device("cpu")))
        return self.radius_of(Climb(one, model, names, params))

    def known(self) -> Number | None:
        """Rho if it is the same number for every ascent of this step, else None."""
        return None

    def at(self, progress: Progress) -> Radius:
        """The rule at one point of the training; only :class:`Scheduled` changes."""
        return self

    # -- the numbers, which may change from step to step without recording a captured step again --------------------

    def numbers(self) -> tuple[Number, ...]:
        """The numbers of the rule, those of the rules in it included."""
        found: list[Number] = []
        for value in self._values().values():
            if isinstance(value, Radius):
                found += value.numbers()
            elif _is_number(value):
                found.append(value)
        return tuple(found)

    def structure(self) -> Hashable:
        """Everything else: two rules of one structure run the same operations."""
        kept = [
            (name, value.structure() if isinstance(value, Radius) else "number" if _is_number(value) else value)
            for name, value in self._values().items()
        ]
        return (type(self), self.is_zero(), *kept)

    def with_numbers(self: Self, numbers: Iterator[Number]) -> Self:
        """The rule with other numbers, in the order of :meth:`numbers`."""
        changes: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Radius):
                changes[name] = value.with_numbers(numbers)
            elif _is_number(value):
                changes[name] = next(numbers)
        return self._with(**changes)

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def _with(self: Self, **changes: Any) -> Self:
        """A copy whose values are not checked: scaled numbers may be negative, and recorded ones are tensors."""
        made = object.__new__(type(self))
        for name, value in {**self._values(), **changes}.items():
            object.__setattr__(made, name, value)
        return made

    def __mul__(self: Self, factor: Number) -> Self:
        return self.scaled(factor)

    __rmul__ = __mul__

    def __truediv__(self: Self, factor: float) -> Self:
        return self.scaled(1 / factor)

    def __neg__(self: Self) -> Self:
        return self.scaled(-1.0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


Rho = float | Radius | Mapping[Any, Any]


@dataclass(frozen=True)
class Fixed(Radius):
    """A number, as it is given: ``rho=0.05`` is ``Fixed(0.05)``."""

    rho: Number

    def __repr__(self) -> str:
        return repr(self.rho)

    def radius_of(self, climb: Climb) -> Number:
        """The number."""
        return self.rho

    def scaled(self, factor: Number) -> Fixed:
        """Scales the number."""
        return self._with(rho=self.rho * factor)

    def known(self) -> Number:
        """The number."""
        return self.rho
