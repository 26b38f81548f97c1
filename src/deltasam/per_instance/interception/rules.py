"""The rules: what the engine does when an operation of the model is called with a perturbed parameter.

The table is keyed by the *operation*, not by the module: ``nn.Linear``, LoRA adapters and tied heads all call
``F.linear``; scaled and offset embeddings both call ``F.embedding``. An operation without a rule is carried out with
the parameter written out for every instance, which is exact, and cheap for small parameters (class tokens, scales).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltasam.per_instance.algebra.calls import Normal
from deltasam.per_instance.interception.attention import attention
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.tensors import RULES, PerInstance, Proxy, unwrapped

Rule = Callable[..., Any]


def register_rule(*operations: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of torch, as a decorator.

    A rule is called as ``rule(state, *args, **kwargs)`` with the arguments of the operation. Perturbed parameters are
    proxies, and ``state.values(proxy)`` is the parameter of every instance, ``(N, *shape)``. The rule returns the
    result of the operation, or ``NotImplemented`` for the general treatment. See :doc:`/howto/own_layer_rule`.

    Example:
        >>> @register_rule(torch.nn.functional.bilinear)
        ... def bilinear(state, first, second, weight, bias=None):
        ...     return NotImplemented
        >>> _ = RULES.pop(torch.nn.functional.bilinear)
    """

    def add(rule: Rule) -> Rule:
        for operation in operations:
            RULES[operation] = rule
        return rule

    return add


@register_rule(F.linear)
def linear(state: PassState, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``x W^T + b``."""
    if isinstance(weight, PerInstance):
        return NotImplemented
    x = state.data(x)
    if not isinstance(weight, Proxy) or isinstance(bias, PerInstance):  # the bias differs between instances
        return F.linear(x, weight) if bias is None else F.linear(x, weight) + bias
    return _matrix(state, x, weight, bias, weight.parameter, transposed=False)


@register_rule(torch.addmm)
def addmm(state: PassState, bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """``b + x W`` with the weight stored as (in, out): GPT-2's ``Conv1D``, which flattens its input first."""
    odd = beta != 1 or alpha != 1 or isinstance(x, Proxy) or isinstance(bias, PerInstance) or bias.ndim != 1
    if odd or isinstance(weight, PerInstance):
        return NotImplemented
    if not isinstance(weight, Proxy):  # only the bias differs between instances
        return torch.mm(x, weight) + bias
    return _matrix(state, x, weight, bias, weight.parameter.t(), transposed=True)


@register_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(state: PassState, x: Tensor, weight: Tensor) -> Any:
    """``x W`` with a bare parameter as the weight."""
    if not isinstance(weight, Proxy) or weight.ndim != 2 or isinstance(x, Proxy) or x.ndim < 2:
        return NotImplemented
    return _matrix(state, x, weight, None, weight.parameter.t(), transposed=True)


def _matrix(state: PassState, x: Tensor, weight: Proxy, bias: Any, matrix: Tensor, *, transposed: bool) -> Tensor:
    layout = state.layout(x, weight, 1)
    if layout.kind == "shared":
        once = F.linear(x.reshape(1, -1, x.shape[-1]), matrix, unwrapped(bias))
        rows, recorded = state.rows(x, layout)
        y = state.grouping.rows(once.expand(layout.size, -1, -1).contiguous())
        y = state.matrix(weight, bias, rows, y, recorded, layout, transposed)
    else:
        rows, recorded = state.rows(x, layout)
        y = state.linear(weight, bias, rows, matrix, recorded, layout, transposed)
    return layout.join(state.grouping.unrows(y))


@register_rule(F.embedding)
def embedding(
    state: PassState,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table. The row ``padding_idx`` has no gradient, so it is not perturbed either."""
    if max_norm is not None or scale_grad_by_freq:
        state.refuse("embedding with max_norm or scale_grad_by_freq", weight)
    if not isinstance(weight, Proxy):
        return NotImplemented
    table = weight.parameter
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    layout = state.layout(ids, weight, 0)
    split = layout.split(ids.unsqueeze(-1) if ids.ndim == 0 else ids, 0)
    rows = split if state.grouping.m == 1 else state.grouping.rows(split.unsqueeze(-1)).squeeze(-1)
    if layout.kind == "shared":
        y = state.grouping.rows(F.embedding(split[:1], table, padding_idx).expand(layout.size, -1, -1))
    else:
        y = F.embedding(rows, table, padding_idx, sparse=sparse)
    y = state.table(weight, rows, y, layout, padding)
    return layout.join(state.grouping.unrows(y))


@register_rule(F.conv1d, F.conv2d)
def convolution(
    state: PassState,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A convolution is a matrix applied to patches. Grouped convolutions are small and written out."""
    spatial = weight.ndim - 2
    simple = isinstance(weight, Proxy) and groups == 1 and not isinstance(padding, str) and x.ndim == spatial + 2
    if not simple or isinstance(x, (PerInstance, Proxy)) or isinstance(bias, PerInstance):
        return NotImplemented
    assert isinstance(weight, Proxy)
    layout = state.layout(x, weight, spatial + 1)
    if layout.kind == "shared":
        return NotImplemented
    convolve = F.conv1d if spatial == 1 else F.conv2d
    y = convolve(x, weight.parameter, unwrapped(bias), stride, padding, dilation)
    positions = y.shape[2:]
    image = x.unsqueeze(2) if spatial == 1 else x
    sizes = [_pair(k, spatial, fill) for k, fill in zip((padding, stride, dilation), (0, 1, 1), strict=True)]
    kernel = (1, *weight.shape[2:]) if spatial == 1 else tuple(weight.shape[2:])

    def patches(of: Tensor) -> Tensor:
        found = F.unfold(of, kernel, dilation=sizes[2], padding=sizes[0], stride=sizes[1]).transpose(1, 2)
        return state.grouping.rows(layout.split(found, 1))

    def to_rows(of: Tensor) -> Tensor:
        return state.grouping.rows(layout.split(of.flatten(2).transpose(1, 2), 1))

    recorded = patches(image.detach()) if state.recording else image
    inputs = image if state.perturbation is None else patches(image)
    rows = state.matrix(weight, bias, inputs, to_rows(y).contiguous(), recorded, layout)
    back = layout._replace(lead=(x.shape[0], positions.numel())).join(state.grouping.unrows(rows))
    return back.transpose(1, 2).contiguous().view(x.shape[0], y.shape[1], *positions)


def _pair(value: Any, spatial: int, fill: int) -> tuple[int, int]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,) * spatial
    return (fill, numbers[0]) if spatial == 1 else (numbers[0], numbers[1])


@register_rule(F.layer_norm)
def layer_norm(
    state: PassState, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """At w the layer as it is; perturbed: normalise, then scale and shift by the vectors of the instance."""
    x = state.data(x)
    normal = Normal(torch.layer_norm, (tuple(shape), None, None, eps))
    layout = state.norm_layout(x, weight, bias)
    if layout is None:
        return _affine(state, normal(x), weight, bias, len(shape), 0)
    y = torch.layer_norm(x, shape, weight.parameter, unwrapped(bias), eps)
    return state.norm(weight, bias, x, y, layout, normal)


@register_rule(F.rms_norm)
def rms_norm(state: PassState, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """As :func:`layer_norm`, without the shift."""
    x = state.data(x)
    normal = Normal(torch.rms_norm, (tuple(shape), None, eps))
    layout = state.norm_layout(x, weight, None)
    if layout is None:
        return _affine(state, normal(x), weight, None, len(shape), 0)
    return state.norm(weight, None, x, torch.rms_norm(x, shape, weight.parameter, eps), layout, normal)


@register_rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
def scaling(state: PassState, input: Any, other: Any, **options: Any) -> Any:  # noqa: A002 (torch's name)
    """A batch times a vector, over the last dimension: Llama's norms, the layer scales of image models."""
    weight, x = (input, other) if isinstance(input, Proxy) else (other, input)
    fits = not options and isinstance(weight, Proxy) and weight.ndim == 1 and type(x) is Tensor and x.ndim > 1
    if not fits or x.shape[-1] != weight.shape[0] or not x.is_floating_point():
        return NotImplemented
    layout = state.layout(x, weight, 1)
    if layout.kind == "shared":
        return NotImplemented
    if state.perturbation is None:
        return state.norm(weight, None, x, x * weight.parameter, layout, Normal(_same, ()))
    return _affine(state, x.to(torch.result_type(x, weight.parameter)), weight, None, 1, 0)


@register_rule(F.group_norm)
def group_norm(
    state: PassState, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The channels are the first of the feature dimensions, the positions follow."""
    return _affine(state, F.group_norm(state.data(x), groups, None, None, eps), weight, bias, x.ndim - 1, x.ndim - 2)


@register_rule(F.batch_norm)
def batch_norm(
    state: PassState,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """In eval mode the statistics are fixed: a scale and a shift. A model in training mode is refused earlier."""
    normal = F.batch_norm(state.data(x), mean, var, None, None, training, momentum, eps)
    return _affine(state, normal, weight, bias, x.ndim - 1, x.ndim - 2)


def _affine(state: PassState, normal: Tensor, weight: Any, bias: Any, features: int, positions: int) -> Any:
    """Scales and shifts ``normal``, whose features end in ``positions`` dimensions that share a scale."""
    owner = weight if isinstance(weight, Proxy) else bias
    if not isinstance(owner, Proxy) or isinstance(weight, PerInstance) or isinstance(bias, PerInstance):
        return NotImplemented
    layout = state.layout(normal, owner, features)
    rows = layout.split(normal, features)

    def of(parameter: Any) -> Any:
        if parameter is None or not isinstance(parameter, Proxy):
            return parameter if parameter is None or not positions else parameter.view(-1, *(1,) * positions)
        if not positions and state.perturbation is not None and not state.recording:
            vector = state.perturbation.as_rows(parameter.parameter)
            if vector is not None:
                return vector
        value = state.values(parameter).unsqueeze(1)
        return value.reshape(*value.shape, *(1,) * positions) if positions else value

    scale, shift = of(weight), of(bias)
    if scale is not None and shift is not None:
        moved = torch.addcmul(shift, rows, scale)
    else:
        moved = rows if scale is None else rows * scale
        moved = moved if shift is None else moved + shift
    return layout.join(moved if moved.dtype == normal.dtype else moved.to(normal.dtype))


def _same(x: Tensor) -> Tensor:
    return x


register_rule(F.multi_head_attention_forward)(attention)

_OF_THE_PACKAGE = dict(RULES)


def has_own_rules() -> bool:
    """Whether the user has registered rules."""
    return RULES != _OF_THE_PACKAGE
