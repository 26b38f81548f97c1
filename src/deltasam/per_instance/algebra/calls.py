"""What the engine records of one use of a parameter at w: enough to write down its per-instance gradient later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

#: A product with a matrix, a table lookup, the scale and shift of a norm, or a parameter written out per instance.
Form = Literal["matrix", "rows", "norm", "dense"]


class Normal(NamedTuple):
    """The normalisation of a norm layer without its scale and shift; equal ones are computed together."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The normalised ``x``."""
        return self.function(x, *self.arguments)


class Call(NamedTuple):
    """One use of a parameter: its input, and the edge of the graph where the gradient of its output arrives."""

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor | None
    edge: GradientEdge  # and not the output, which the model may change in place
    form: Form
    transposed: bool = False
    padding: int | None = None
    normal: Normal | None = None
    arrange: Callable[[Tensor], Tensor] | None = None  # brings input and output of a norm to (G, S, *features)

    def arranged(self, gradient: Tensor) -> Tensor:
        """A gradient of the output as (G, S, *features)."""
        if self.form == "matrix" and self.inputs is not None:
            groups, rows, _ = self.inputs.shape
            if gradient.ndim == 3 and gradient.shape[0] == groups and gradient.shape[1] == rows:
                return gradient
            return gradient.reshape(groups, rows, gradient.numel() // max(1, groups * rows))
        return gradient if self.arrange is None else self.arrange(gradient)
