"""Fast paths for the modules that models call most, with the same results as the rules.

torch returns an operation that is called with a :class:`Proxy` to Python, which takes as long as launching the
operation itself. On a fast device an eager step waits for that, so plain ``nn.Linear`` and ``nn.LayerNorm`` modules
get another ``forward`` during a pass. What a pass does not change is looked up once, when the ``forward`` is made.
Every unusual case takes the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam._torch import parameters_of
from deltasam.per_instance.algebra.calls import Normal
from deltasam.per_instance.algebra.layers import perturbed_linear, perturbed_norm
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.tensors import Proxy, unwrapped

Forward = Callable[[Any], Any]


def shorten(modules: Iterable[nn.Module], state: PassState) -> Iterator[dict[str, Any]]:
    """Gives the modules that have a shortcut another ``forward`` for one pass; yields their attributes before.

    Subclasses and modules with their own ``forward`` attribute keep theirs: both may do anything. So do modules whose
    weight is not a parameter but computed by a hook (pruning, the older weight norm), or is not perturbed.
    """
    if state.grouping.m > 1 or (state.perturbation is not None and state.recording):
        return
    for module in modules:
        make, attributes, own = SHORTCUTS.get(type(module)), vars(module), parameters_of(module)
        usual = "forward" not in attributes and "bias" in own and type(own.get("weight")) is Proxy
        if make is not None and usual:
            yield attributes
            attributes["forward"] = make(module, own, state)


def lengthening(changed: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """An iterator that undoes :func:`shorten` when it is consumed; in one call, so that no interruption halves it."""
    return map(dict.pop, changed, repeat("forward"), repeat(None))


# In all of them the parameters are compared in every call: hooks may exchange them.


def _linear(module: Any, own: dict[str, Any], state: PassState) -> Forward:
    weight, bias = own["weight"], own["bias"]
    matrix, shift = weight.parameter, unwrapped(bias)
    offset = bias.parameter if type(bias) is Proxy else None
    perturbation = state.perturbation

    def at_w(input: Any) -> Any:  # noqa: A002 (torch's name: modules are called with it by keyword)
        if own["weight"] is weight and own["bias"] is bias and type(input) is Tensor:
            layout = state.layout(input, weight, 1)
            if layout.is_split:
                rows, recorded = state.rows(input, layout)
                return state.noted(matrix, offset, F.linear(rows, matrix, shift), recorded, layout)
        return nn.Linear.forward(module, input)

    if perturbation is None:
        return at_w
    known = perturbation.low_rank(matrix, offset, transposed=False)
    if known is None:
        return module.forward  # type: ignore[no-any-return]
    (factor, c), products, is_eager = known, perturbation.products, perturbation.is_eager

    def perturbed(input: Any) -> Any:  # noqa: A002
        if own["weight"] is weight and own["bias"] is bias and type(input) is Tensor and state.is_split(input, weight):
            return perturbed_linear(state.cast(input), matrix, shift, factor, c, products, is_eager=is_eager)
        return nn.Linear.forward(module, input)

    return perturbed


def _layer_norm(module: Any, own: dict[str, Any], state: PassState) -> Forward:
    weight, bias, shape, eps = own["weight"], own["bias"], module.normalized_shape, module.eps
    if type(bias) is not Proxy or len(shape) != 1:
        return module.forward  # type: ignore[no-any-return]
    scale, shift = weight.parameter, bias.parameter
    normal = Normal(torch.layer_norm, (tuple(shape), None, None, eps))

    def at_w(input: Any) -> Any:  # noqa: A002
        if own["weight"] is weight and own["bias"] is bias and type(input) is Tensor:
            layout = state.layout(input, weight, 1)
            if layout.is_split:
                y = torch.layer_norm(input, shape, scale, shift, eps)
                return state.norm(weight, bias, input, y, layout, normal)
        return nn.LayerNorm.forward(module, input)

    if state.perturbation is None:
        return at_w
    moves = state.perturbation.move_of(scale), state.perturbation.move_of(shift)
    if moves[0] is None or moves[1] is None:
        return module.forward  # type: ignore[no-any-return]
    pair, dtype, is_eager = (moves[0], moves[1]), moves[0].dtype, state.perturbation.is_eager

    def perturbed(input: Any) -> Any:  # noqa: A002
        usual = own["weight"] is weight and own["bias"] is bias and type(input) is Tensor
        if usual and input.dtype is dtype and scale.dtype is dtype and state.is_split(input, weight):
            return perturbed_norm(input, scale, shift, pair, eps, is_eager=is_eager)
        return nn.LayerNorm.forward(module, input)

    return perturbed


SHORTCUTS: dict[type[nn.Module], Callable[[Any, dict[str, Any], PassState], Forward]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
}
