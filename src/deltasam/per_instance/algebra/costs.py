r"""Which form of the per-instance gradients of a layer costs less: estimated from shapes, before anything is computed.

With :math:`u = 2 G S \cdot in \cdot out` FLOPs, one product of the layer, SAM needs 6 u: two forwards, two backwards
with weight gradients. Here the first backward has no weight gradient, and

- *low rank* takes :math:`5 u + 3 S (1/in + 1/out)\, u`: the two Gram matrices of the norm, and six thin products less;
- *written out* takes 6 u: one product for :math:`D_g^\top X_g`, and the perturbed layer multiplies with
  :math:`W + c_g D_g^\top X_g`. But matrices of all G groups pass through memory six times.

So low rank is for short texts and many groups, and the other form for long texts and few groups. A product takes the
longer of its two times, for the FLOPs and for the memory traffic. Nothing is measured at run time: equal shapes always
get equal forms, so a recorded step is the ordinary one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

Kept = Literal["low-rank", "written"]

#: What is kept at most by default, relative to low rank everywhere (inputs and output gradients of the layers).
SHARE = 1.25


class Machine(NamedTuple):
    """What a device reaches in large products, FLOP/s and byte/s. Only the quotient decides between forms."""

    flops: float
    traffic: float

    def seconds(self, flops: float, numbers: float, itemsize: int) -> float:
        """The time of one operation."""
        return max(flops / self.flops, numbers * itemsize / self.traffic)


_GPU = {torch.bfloat16: 6e14, torch.float16: 6e14, torch.float32: 5e13, torch.float64: 5e13}
_GPU_TF32, _GPU_TRAFFIC = 3e14, 4e12
_CPU = Machine(1e11, 1e10)


def machine(device: torch.device, dtype: torch.dtype, *, tf32: bool = False) -> Machine:
    """The figures for products of this dtype, of a data-centre GPU (their quotients differ little) or of a CPU."""
    if device.type != "cuda":
        return _CPU
    return Machine(_GPU_TF32 if tf32 and dtype is torch.float32 else _GPU.get(dtype, 5e13), _GPU_TRAFFIC)


class Layer(NamedTuple):
    """The shapes of all uses of one weight as a matrix.

    Attributes:
        groups: G.
        rows: S, the rows of one group, those of all calls together.
        inputs: Columns of the inputs.
        outputs: Columns of the outputs.
        itemsize: Bytes of a number.
        sharing: How many weights take the same input (query, key and value: 3).
        own: Whether the perturbed layer can multiply with one matrix per group. If not, the perturbation is a product
            of its own, forward and backward.
        trained: Whether the weight is trained. There may be far more frozen ones than memory for a copy of them.
    """

    groups: int
    rows: int
    inputs: int
    outputs: int
    itemsize: int
    sharing: int = 1
    own: bool = True
    trained: bool = True

    def kept(self, form: Kept) -> int:
        """Bytes that stay between the two passes."""
        if form == "written":
            return self.groups * self.inputs * self.outputs * self.itemsize
        return self.groups * self.rows * (self.inputs // self.sharing + self.outputs) * self.itemsize

    def seconds(self, form: Kept, on: Machine) -> float:
        """The estimated time of everything after the backward to the outputs of the layer: norm and perturbed pass."""
        return self._written(on) if form == "written" else self._low_rank(on)

    def _low_rank(self, on: Machine) -> float:
        g, s, i, o, b = self.groups, self.rows, self.inputs, self.outputs, self.itemsize
        square, x, y = g * s * s, g * s * i, g * s * o
        with_inputs = [
            on.seconds(2 * square * i, x + square, b),  # X X^T
            on.seconds(2 * square * i, 2 * x + square, b),  # x X^T
            on.seconds(0, 4 * square, b),  # times c, forward and backward
            on.seconds(2 * square * i, 3 * x + square, b),  # its gradient
        ]
        with_outputs = [
            on.seconds(2 * square * o, y + square, b),  # D D^T
            on.seconds(0, 4 * square, b),  # times X X^T, and the sum
            on.seconds(2 * square * o, 3 * y + square, b),  # added to the output
            on.seconds(2 * square * o, 2 * y + square, b),  # its gradient
        ]
        layer = 3 * on.seconds(2 * x * o, x + y + i * o, b)  # forward and backward of the second pass
        return sum(with_inputs) / self.sharing + sum(with_outputs) + layer

    def _written(self, on: Machine) -> float:
        g, s, i, o, b = self.groups, self.rows, self.inputs, self.outputs, self.itemsize
        matrices, x, y = g * i * o, g * s * i, g * s * o
        own = on.seconds(2 * x * o, x + y + matrices, b)
        together = on.seconds(2 * x * o, x + y + i * o, b)
        made = own + on.seconds(0, matrices, b) + on.seconds(0, 2 * matrices, b)  # D^T X, its norm, times c
        if self.own:
            return made + 2 * own + together
        added = sum(on.seconds(2 * x * o, x + y + matrices + target, b) for target in (x, y))
        return made + added + 3 * together


@lru_cache(maxsize=128)
def choose(layers: tuple[Layer, ...], on: tuple[Machine, ...], most: int | None = None) -> tuple[Kept, ...]:
    """The fastest forms of which no more than ``most`` bytes are kept.

    By default this is :data:`SHARE` times low rank, and frozen weights take their smallest form. If even the smallest
    forms of all layers do not fit, those are taken. Else layers change to their faster form, first those that save the
    most time per byte.
    """
    may_grow = [layer.trained or most is not None for layer in layers]
    if most is None:
        most = int(SHARE * sum(layer.kept("low-rank") for layer in layers))
    forms: list[Kept] = []
    for layer, machine in zip(layers, on, strict=True):
        both: tuple[Kept, Kept] = ("low-rank", "written")
        forms.append(min(both, key=lambda form: (layer.kept(form), layer.seconds(form, machine))))
    room = most - sum(layer.kept(form) for layer, form in zip(layers, forms, strict=True))
    gains: list[tuple[float, int, int, Kept]] = []
    for k, (layer, machine, form) in enumerate(zip(layers, on, forms, strict=True)):
        other: Kept = "written" if form == "low-rank" else "low-rank"
        saved = layer.seconds(form, machine) - layer.seconds(other, machine)
        more = layer.kept(other) - layer.kept(form)
        if saved > 0 and may_grow[k]:
            gains.append((-saved / max(more, 1), k, more, other))
    for _, k, more, other in sorted(gains):
        if more <= room:
            forms[k] = other
            room -= more
    return tuple(forms)
