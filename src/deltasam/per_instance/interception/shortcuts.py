"""Fast paths for the modules that models call most, with the same results as the rules.

torch returns an operation that is called with a :class:`Proxy` to Python, which takes as long as launching the
operation itself. On a fast device an eager step waits for that, so plain ``nn.Linear`` and ``nn.LayerNorm`` modules
get another ``forward`` during a pass. Every unusual case takes the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import parameters_of
from deltasam.per_instance.algebra.calls import Normal
from deltasam.per_instance.algebra.operations import scaled_norm
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.tensors import Proxy

Forward = Callable[[Any], Any]


def shorten(modules: Iterable[nn.Module], state: PassState) -> Iterator[dict[str, Any]]:
    """Gives the modules that have a shortcut another ``forward`` for one pass; yields their attributes before.

    Subclasses and modules with their own ``forward`` attribute keep theirs: both may do anything. So do modules whose
    weight is not a parameter but computed by a hook (pruning, the older weight norm).
    """
    for module in modules:
        make, attributes = SHORTCUTS.get(type(module)), vars(module)
        usual = "forward" not in attributes and {"weight", "bias"} <= parameters_of(module).keys()
        if make is not None and usual:
            yield attributes
            attributes["forward"] = make(module, state)


def lengthening(changed: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """An iterator that undoes :func:`shorten` when it is consumed; in one call, so that no interruption halves it."""
    return map(dict.pop, changed, repeat("forward"), repeat(None))


def _linear(module: Any, state: PassState) -> Forward:
    own = parameters_of(module)  # read in every call: hooks may exchange its contents

    def forward(input: Any) -> Any:  # noqa: A002 (torch's name: modules are called with it by keyword)
        weight, bias = own["weight"], own["bias"]
        if type(weight) is Proxy and type(input) is Tensor:
            layout = state.layout(input, weight, 1)
            if layout.is_split and state.grouping.m == 1:
                rows, recorded = state.rows(input, layout)
                return state.linear(weight, bias, rows, weight.parameter, recorded, layout)
        return nn.Linear.forward(module, input)

    return forward


def _layer_norm(module: Any, state: PassState) -> Forward:
    own, shape, eps = parameters_of(module), module.normalized_shape, module.eps
    normal = Normal(torch.layer_norm, (tuple(shape), None, None, eps))
    perturbation = state.perturbation

    def forward(input: Any) -> Any:  # noqa: A002 (torch's name: modules are called with it by keyword)
        weight, bias = own["weight"], own["bias"]
        if type(weight) is Proxy and type(bias) is Proxy and type(input) is Tensor and len(shape) == 1:
            layout = state.layout(input, weight, 1)
            if layout.is_split and perturbation is None:
                y = torch.layer_norm(input, shape, weight.parameter, bias.parameter, eps)
                return state.norm(weight, bias, input, y, layout, normal)
            if layout.is_split and perturbation is not None and not state.recording:
                scale, shift = perturbation.as_rows(weight.parameter), perturbation.as_rows(bias.parameter)
                if scale is not None and shift is not None and input.ndim == 3 and scale.dtype is input.dtype:
                    return scaled_norm(input, scale, shift, eps)
        return nn.LayerNorm.forward(module, input)

    return forward


SHORTCUTS: dict[type[nn.Module], Callable[[Any, PassState], Forward]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
}
