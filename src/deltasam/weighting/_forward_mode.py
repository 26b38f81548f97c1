"""Second derivatives by nested forward mode, where torch gets them right.

torch's forward-mode formulas of ``layer_norm``, and of ``batch_norm`` and ``instance_norm`` in training mode, treat
the saved mean and deviation as constants when they are differentiated once more. The second derivative is then wrong,
without an error (pytorch#196700, #196699). ``silu``, ``mish`` and ``glu`` have no second forward mode. Here they are
written out in elementary operations; the tests compare them with Hessian-vector products. The fused attention kernels
have no forward mode at all, so attention is not fused here.

Other operations with a wrong second derivative (solvers, determinants, cumulative products, ...) do not occur in the
models that are fine-tuned. They are refused if their arguments depend on the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# -- norms ------------------------------------------------------------------------------------------------------------


def _standardised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as the fused kernels compute
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)


def _channel_norm(x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight, bias = (None if v is None else v.view(1, -1, *[1] * (x.ndim - 2)) for v in (weight, bias))
    return _affine(_standardised(x, dims, eps), weight, bias, x.dtype)


def _layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_standardised(x, list(range(-len(normalized_shape), 0)), eps), weight, bias, x.dtype)


# torch.nn.functional passes the options of these two by name.


def _batch_norm(x: Tensor, mean: Any, variance: Any, *, training: bool, eps: float, **options: Any) -> Tensor:
    if not training:
        return F.batch_norm(x, mean, variance, training=False, eps=eps, **options)
    # The running statistics are not updated: this is an extra pass, without side effects on them.
    return _channel_norm(x, [d for d in range(x.ndim) if d != 1], eps, options["weight"], options["bias"])


def _instance_norm(x: Tensor, *, use_input_stats: bool, eps: float, **options: Any) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(x, use_input_stats=False, eps=eps, **options)
    return _channel_norm(x, list(range(2, x.ndim)), eps, options["weight"], options["bias"])


def _group_norm(x: Tensor, *args: Any, **options: Any) -> Tensor:
    # Its forward mode makes views that the channels-last layout does not allow.
    return torch.group_norm(x.contiguous(), *args, **options)


# -- activations ------------------------------------------------------------------------------------------------------


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _put(x * x.sigmoid(), x, inplace)


def _mish(x: Tensor, inplace: bool = False) -> Tensor:
    return _put(x * F.softplus(x).tanh(), x, inplace)


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    values, gates = x.chunk(2, dim)
    return values * gates.sigmoid()


def _put(result: Tensor, x: Tensor, inplace: bool) -> Tensor:
    return x.copy_(result) if inplace else result


# -- losses -----------------------------------------------------------------------------------------------------------


def _linear_cross_entropy(x: Tensor, *args: Any, options: Any = None, **named: Any) -> Any:
    """Without the options, which ask for chunks: in chunks the derivatives in forward mode are 0."""
    return F.linear_cross_entropy(x, *args, **named)


# -- reverse mode -----------------------------------------------------------------------------------------------------


def _requires_grad(x: Tensor, requires_grad: bool = True) -> Tensor:
    """Hooks for activation checkpointing and for adapters call it; it has no effect in a pass without a graph."""
    return x


def _grad(*args: Any, **options: Any) -> Any:
    raise _refusal("an objective that takes gradients itself (SMART, VAT)")


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.silu: _silu,
    F.mish: _mish,
    F.glu: _glu,
    Tensor.requires_grad_: _requires_grad,
    torch.autograd.grad: _grad,
}
if hasattr(F, "linear_cross_entropy"):  # not in torch 2.6
    _WRITTEN_OUT[F.linear_cross_entropy] = _linear_cross_entropy

#: Operations whose second derivative torch gets wrong, without an error, in one of the supported versions.
_REFUSED = {
    torch.batch_norm, torch.native_batch_norm, torch.instance_norm, torch.native_layer_norm,
    torch.cumprod, Tensor.cumprod, Tensor.cumprod_, torch.logcumsumexp, Tensor.logcumsumexp,
    torch.det, Tensor.det, torch.linalg.det, torch.logdet, Tensor.logdet, torch.slogdet, Tensor.slogdet,
    torch.linalg.slogdet, torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.tensorsolve,
    torch.linalg.householder_product, torch.orgqr, Tensor.orgqr, torch.cholesky_inverse, Tensor.cholesky_inverse,
    torch.triangular_solve, Tensor.triangular_solve,
}  # fmt: skip
_SCATTERS = {torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_}


def _is_refused(func: Any, args: Any, named: dict[str, Any]) -> bool:
    """Whether torch's second derivative of this call is wrong. Those of constants are 0, and right."""
    values = (*args, *named.values())
    is_product = func in _SCATTERS and any(isinstance(value, str) and value == "prod" for value in values)
    return (func in _REFUSED or is_product) and any(map(_depends_on_weights, values))


def _depends_on_weights(value: Any) -> bool:
    return isinstance(value, Tensor) and unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


class _Elementary(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if _is_refused(func, args, named):
            raise _refusal(func.__name__)
        if func in _WRITTEN_OUT:
            if "input" in named:
                named["x"] = named.pop("input")
            return _WRITTEN_OUT[func](*args, **named)
        return func(*args, **named)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Inside, the model's forward can be differentiated twice in forward mode, correctly.

    Raises:
        NotImplementedError: The model uses an operation without a (correct) second derivative in forward mode.
    """
    try:
        with _Elementary(), sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:  # NotImplementedError is a subclass
        operation = _operation_in(str(error))
        if operation is None:
            raise
        raise _refusal(operation, str(error).splitlines()[0]) from error


def _refusal(operation: str, reason: str = "") -> NotImplementedError:
    return NotImplementedError(
        "Directional needs the second derivative in forward mode, and torch has none, or a wrong one, for "
        f"{operation}: use another weighting, such as FiniteDifference() or OwnGradient()"
        f"{f' ({reason})' if reason else ''}"
    )


def _operation_in(message: str) -> str | None:
    """The operation without forward mode that an error of torch names; None if the error is about something else."""
    named = re.search(r"forward AD with (\S+) that does not support it", message)
    if named is not None:
        return named[1]
    own = "autograd.Function" in message and ("functorch transforms" in message or "jvp" in message)
    return "an autograd.Function of the model" if own else None
