"""Quantized layers in a pass: their output is perturbed, because there is no weight that a proxy could replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import parameters_of
from deltasam.per_instance.interception.tensors import PerInstance, Proxy


def perturbed_forward(layer: nn.Module, proxy: Proxy) -> Callable[..., Any]:
    """The forward of a linear layer, as it is, with the perturbation of its weight and bias added to the output.

    Args:
        layer: A layer that maps its first argument (..., in) to (..., out), see :mod:`deltasam.step.quantized`.
        proxy: The proxy of its stand-in.
    """
    original, own = layer.forward, parameters_of(layer)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = proxy.state
        if isinstance(x, (PerInstance, Proxy)):
            state.refuse(f"the forward of {type(layer).__name__}, a quantized layer,", proxy)
        bias = own.get("bias")
        if isinstance(bias, Proxy):  # the kernels of the layer take no proxies
            own["bias"] = bias.parameter
        try:
            y = original(x, *args, **kwargs)
        finally:
            if isinstance(bias, Proxy):
                own["bias"] = bias
        # The first layers of a frozen model: nothing before them requires a gradient. Activation checkpointing calls
        # the layer again, when nothing is recorded any more, and must find the same graph.
        if state.differentiated and torch.is_grad_enabled() and not y.requires_grad:
            y = y.detach().requires_grad_(True).clone()
        layout = state.layout(x, proxy, 1)
        rows, recorded = state.rows(x, layout)
        out = state.grouping.rows(layout.split(y, 1))
        if state.perturbation is not None:
            out = out.clone()  # the sum is written to this memory, and the layer may have saved its output
        return layout.join(state.grouping.unrows(state.matrix(proxy, bias, rows, out, recorded, layout)))

    return forward
