"""Quantized layers in a pass: their output is perturbed, because there is no weight that a proxy could replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import parameters_of
from deltasam.per_instance.algebra.operations import add_dithered
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
        shift = bias.parameter if isinstance(bias, Proxy) else None
        if shift is not None:  # the kernels of the layer take no proxies
            own["bias"] = shift
        try:
            y = original(x, *args, **kwargs)
        finally:
            if shift is not None:
                own["bias"] = bias
        # The first layers of a frozen model: nothing before them requires a gradient. Activation checkpointing calls
        # the layer again, when nothing is recorded any more, and must find the same graph.
        if state.differentiated and torch.is_grad_enabled() and not y.requires_grad:
            y = y.detach().requires_grad_(True).clone()
        layout = state.layout(x, proxy, 1)
        rows, recorded = state.rows(x, layout)
        out = state.grouping.rows(layout.split(y, 1))
        if state.perturbation is not None:
            move = state.perturbation.linear_move(proxy.parameter, shift, rows, out.shape[-1])
            if move is not None:
                is_half = out.dtype in (torch.bfloat16, torch.float16)
                out = add_dithered(out, move) if is_half else out + move.to(out.dtype)
        return layout.join(state.grouping.unrows(state.recorded(proxy, bias, out, recorded, layout)))

    return forward
