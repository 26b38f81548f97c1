"""Linear layers with quantized weights, one of them written out here, and the two references for them.

A weight-only layer equals a linear layer with the dequantized weights. A layer that rounds its inputs, too, does not:
for every kind, a perturbation of the weights is a product that is added to the output, here with a matrix of zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Module):
    """Four bits in the manner of GPTQ: integers packed by eight into int32, a scale and a zero per group and output.

    Nothing of it is a parameter, except the bias.
    """

    def __init__(self, linear: nn.Linear, group: int = 8) -> None:
        super().__init__()
        self.infeatures, self.outfeatures, self.group = linear.in_features, linear.out_features, group
        w = linear.weight.detach().T.reshape(-1, group, self.outfeatures)  # (groups, group, out)
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        scales = (high - low) / 15
        q = ((w - low) / scales).round().to(torch.int64).reshape(-1, 8, self.outfeatures)
        packed = sum(q[:, k] << (4 * k) for k in range(8))
        self.register_buffer("qweight", torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32))
        self.register_buffer("scales", scales.squeeze(1))
        self.register_buffer("zeros", (-low / scales).squeeze(1))
        self.bias = linear.bias

    def dequantized(self) -> Tensor:
        """The weights, (out, in)."""
        places = torch.arange(0, 32, 4).view(1, 8, 1)
        q = ((self.qweight.unsqueeze(1) >> places) & 15).reshape(-1, self.group, self.outfeatures)
        w = (q - self.zeros.unsqueeze(1)) * self.scales.unsqueeze(1)
        return w.reshape(self.infeatures, self.outfeatures).T

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized().to(x.dtype), self.bias)


class WithOffset(nn.Module):
    """Any layer plus a product with a matrix of zeros, by which autograd differentiates and which can be moved."""

    def __init__(self, layer: nn.Module, shape: tuple[int, int]) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(x, self.weight)


class Net(nn.Module):
    """Tokens, three layers to quantize, and a head; ``build`` makes a layer from an ordinary one."""

    def __init__(self, build: Callable[[nn.Linear], nn.Module] = lambda linear: linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 64)
        self.first, self.second = build(nn.Linear(64, 96)), build(nn.Linear(96, 64))
        self.third = build(nn.Linear(64, 32, bias=False))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = self.norm(h + self.second(F.gelu(self.first(h))))
        return self.head(torch.tanh(self.third(h)).mean(1))


def replaced(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The model with another layer under every adapter."""
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            module.base_layer = make(module.base_layer)
    return model
