"""A model whose weights follow those of another, as a moving average."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam._torch import foreach_lerp_, uncompiled


class Teacher:
    """The moving average of a model's trainable parameters, as a model that shares the frozen parameters.

    It is a separate model and not the student with other weights, so that changes of the student between two passes
    (hooks, perturbed weights) do not affect it. The average is kept in float32 at least: a thousandth of a step is
    lost in bfloat16.
    """

    def __init__(self) -> None:
        self.updates = 0
        self._model: nn.Module | None = None
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def move(self, student: nn.Module, beta: float) -> None:
        """``teacher = beta * teacher + (1 - beta) * student``; starts with a copy of the student or a loaded state."""
        inner = _inside(student)
        theirs = dict(inner.named_parameters())
        is_first = not self._average
        if self._model is None or any(p.requires_grad and name not in self._average for name, p in theirs.items()):
            self._make(inner)
        if is_first:
            return
        mine = list(self._average.values())
        foreach_lerp_(mine, [theirs[name].data.to(m.dtype) for name, m in self._average.items()], 1.0 - beta)
        self.updates += 1
        self._show()

    def _make(self, student: nn.Module) -> None:
        """Makes the model, again if parameters were unfrozen, which start at the student's values."""
        self._model, own = _copied(student, self._average)
        for name, p in own.items():
            known = self._average.get(name)
            if known is None:
                self._average[name] = _wide(p.data)
                continue
            self._average[name] = known = known.to(p.device)
            if known.dtype == p.dtype:
                p.data = known  # both share the memory

    def model_like(self, student: nn.Module) -> nn.Module:
        """The teacher, in the student's mode (train or eval); call it under ``no_grad``."""
        if self._model is None:
            raise RuntimeError(
                "the teacher does not exist before the first step: call objective.prepare(model) when a step starts "
                "(the methods do it), or omit the proximal term with mu=0"
            )
        for own, other in zip(self._model.modules(), _inside(student).modules(), strict=True):
            own.training = other.training
        return self._model

    def state_dict(self) -> dict[str, Any]:
        """The number of moves and the averaged weights by name; empty before the first step."""
        if not self._average:
            return {}
        return {"updates": self.updates, "teacher": {name: value.clone() for name, value in self._average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned, also before the model is known."""
        self.updates = int(state.get("updates", 0))
        # A copy: the average changes in place, and the loaded tensors belong to the user.
        self._average = {name: _wide(value).clone() for name, value in state.get("teacher", {}).items()}
        self._model = None  # made again in the next step

    def _show(self) -> None:
        """Copies the average into the model, except where both share the memory."""
        assert self._model is not None
        parameters = dict(self._model.named_parameters())
        for name, value in self._average.items():
            if parameters[name].data_ptr() != value.data_ptr():
                parameters[name].data.copy_(value)


def _wide(value: Tensor) -> Tensor:
    """The value itself in float32 or float64, else a float32 copy."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _inside(model: nn.Module) -> nn.Module:
    inner: nn.Module = uncompiled(model)
    while isinstance(inner, DistributedDataParallel):
        inner = uncompiled(inner.module)
    return inner


def _copied(model: nn.Module, averaged: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy of the model, and the parameters that it does not share: the trainable and the averaged ones."""
    parameters = dict(model.named_parameters())
    unknown = sorted(set(averaged) - set(parameters))
    if unknown:
        raise ValueError(f"the saved teacher belongs to another model: this one has no {unknown[0]!r}")
    for name, value in averaged.items():
        if value.shape != parameters[name].shape:
            raise ValueError(
                f"the saved teacher belongs to another model: {name!r} of this one has the shape "
                f"{tuple(parameters[name].shape)}, not {tuple(value.shape)}"
            )
    frozen = {name for name, p in parameters.items() if not p.requires_grad and name not in averaged}
    shared: dict[int, Any] = {id(parameters[name]): parameters[name] for name in frozen}
    teacher = copy.deepcopy(model, shared)
    own = {name: p for name, p in teacher.named_parameters() if name not in frozen}
    for p in own.values():
        p.requires_grad_(False)
        p.grad = None
    return teacher, own
