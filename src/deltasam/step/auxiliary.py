r"""Low-rank matrices that are added beside the weights of layers: :math:`W x` becomes :math:`W x + B (A x)`.

The product is added to the output of the layer, so nothing is written to W. It may be frozen, stored in half precision
or quantized. Beside a layer with adapters of PEFT the sum is that of the merged matrix and B A, whatever the adapter:
for DoRA, which normalises W + s B_1 A_1, B A is added after the normalisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam._torch import is_compiler_loaded
from deltasam.step.adapters import adapted_layers, innermost
from deltasam.step.precision import no_autocast
from deltasam.step.quantized import is_quantized, layer_of, stand_in


@dataclass(frozen=True)
class Place:
    """A layer beside which a pair can be added.

    Attributes:
        name: The name of the module.
        module: The module whose output the product is added to.
        inputs: The number of columns of A, which has ``rank`` rows.
        outputs: The number of rows of B, which has ``rank`` columns.
        is_table: Whether the layer looks up rows of its matrix instead of multiplying with it.
    """

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    is_table: bool

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B."""
        return (rank, self.inputs), (self.outputs, rank)


def places_beside(model: nn.Module, params: Mapping[str, nn.Parameter]) -> list[Place]:
    """The layers whose matrix is among these parameters: linear layers, also quantized ones, and embedding tables.

    Other parameters (biases, norms, convolutions) have no place. A matrix that two layers share has two.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> places = places_beside(model, dict(model.named_parameters()))
        >>> [(place.name, place.inputs, place.outputs) for place in places]
        [('0', 2, 3), ('2', 3, 1)]
    """
    chosen = {id(p) for p in params.values()}
    packed = {id(layer_of(p)) for p in params.values() if layer_of(p) is not None}
    around: dict[int, tuple[str, nn.Module]] = {}  # by the innermost layer: the outermost one, which adds adapters
    for name, layer in adapted_layers(model).items():
        around.setdefault(id(innermost(layer)), (name, layer))
    found = []
    for name, module in model.named_modules():
        size = _size(module) if id(module) in packed or id(getattr(module, "weight", None)) in chosen else None
        if size is not None:
            outer, hooked = around.get(id(module), (name, module))
            found.append(Place(outer, hooked, *size, is_table=isinstance(module, nn.Embedding)))
    return found


def _size(module: nn.Module) -> tuple[int, int] | None:
    """The numbers of inputs and outputs of a layer that multiplies with its matrix, or looks up its rows."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_quantized(module):
        outputs, inputs = stand_in(module).shape
        return inputs, outputs
    if is_transposed(module):
        matrix: Any = module.weight
        return int(matrix.shape[0]), int(matrix.shape[1])
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether this is the ``Conv1D`` of transformers (GPT-2): a linear layer whose matrix is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


class Added:
    """Pairs that are added to the outputs of layers at the moment."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, nothing is added."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


@contextmanager
def added(places: Sequence[Place], pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Added]:
    """Adds ``B A x`` to the outputs of layers, in forward passes inside. Gradients flow to A and B.

    Adapters that are disabled (``model.disable_adapter()``) disable the pair beside them. Compiled models run as
    written, because compiled code ignores hooks that are added later.

    Args:
        places: The layers.
        pairs: A (rank, inputs) and B (outputs, rank) of each.

    Cost: for T positions ``2 T rank (inputs + outputs)`` operations in a forward pass, twice that in a backward.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> pair = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [5.0]])
        >>> x = torch.tensor([[1.0, 1.0]])
        >>> with added(places_beside(layer, {"weight": layer.weight}), [pair]):
        ...     moved = layer(x)
        >>> (moved - layer(x)).tolist()
        [[0.0, 5.0]]
    """
    state, handles = Added(), []
    try:
        for place, (a, b) in zip(places, pairs, strict=True):
            hook = partial(_add, state, place.is_table, a, b)
            handles.append(place.module.register_forward_hook(hook, with_kwargs=True))
        with _as_written():
            yield state
    finally:
        for handle in handles:
            handle.remove()


def _add(
    state: Added,
    is_table: bool,
    a: Tensor,
    b: Tensor,
    module: nn.Module,
    args: tuple[Any, ...],
    named: dict[str, Any],
    output: Tensor,
) -> Tensor | None:
    if not state.is_on or getattr(module, "disable_adapters", False):
        return None
    x: Tensor = args[0] if args else next(iter(named.values()))
    # In the dtype of the output. Under autocast an addmm would round the output of a float32 layer.
    a, b = (factor.to(output.device, output.dtype) for factor in (a, b))
    with no_autocast(output.device):
        inner = F.embedding(x, a.t()) if is_table else F.linear(x.to(output.device, output.dtype), a)
        rows = torch.addmm(output.reshape(-1, b.shape[0]), inner.reshape(-1, b.shape[1]), b.t())
    return rows.view(output.shape)


def _as_written() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext()


def products_norm(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    r"""The norm of all products together, without computing them.

    .. math:: \sqrt{\textstyle\sum_j \lVert B_j A_j \rVert_F^2}, \qquad
              \lVert B A \rVert_F^2 = \langle B^\top B,\, A A^\top \rangle

    Pairs of one shape are stacked, so that the number of kernels does not grow with the number of layers.

    Example:
        >>> a, b = torch.rand(2, 5), torch.rand(7, 2)
        >>> bool(torch.isclose(products_norm([(a, b), (a, b)]), 2**0.5 * (b @ a).norm()))
        True
    """
    alike: dict[tuple[torch.Size, torch.Size], list[tuple[Tensor, Tensor]]] = {}
    for a, b in pairs:
        alike.setdefault((a.shape, b.shape), []).append((a, b))
    squares = []
    for members in alike.values():
        a, b = (torch.stack(factors) for factors in zip(*members, strict=True))
        squares.append(((a @ a.mT) * (b.mT @ b)).sum())
    return torch.stack(squares).sum().clamp_min(0).sqrt()
