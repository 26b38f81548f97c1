"""Second derivatives by nested forward mode, where torch gets them right.

torch's forward-mode formulas of ``layer_norm``, and of ``batch_norm`` and ``instance_norm`` in training mode, treat
the saved mean and deviation as constants when they are differentiated once more: the second derivative comes out
wrong, without an error (pytorch#196700, #196699). Written out in elementary operations they are right; the tests
compare with Hessian-vector products. Those of ``linalg.solve``, ``cumprod`` with zeros, determinants,
``householder_product``, ``cholesky_inverse``, ``triangular_solve`` with ``transpose`` and products by
``scatter_reduce`` are wrong in the same silent way: the first two are written out, the others are refused where the
weights are behind their arguments.
``silu``, ``mish`` and ``glu`` have no second forward mode, and are written out as well. The fused attention kernels
have no forward mode at all, so attention is unfused meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


def _standardised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as the fused kernels compute
    centred = wide - wide.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    return _affine(_standardised(x, dims, eps), weight, bias, x.dtype)


def _per_channel(value: Tensor | None, x: Tensor) -> Tensor | None:
    return None if value is None else value.view(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    # The running statistics are not updated: an extra pass leaves no trace in them anyway.
    dims = [d for d in range(x.ndim) if d != 1]
    weight, bias = _per_channel(weight, x), _per_channel(bias, x)
    return _affine(_standardised(x, dims, eps), weight, bias, x.dtype)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    weight, bias = _per_channel(weight, x), _per_channel(bias, x)
    return _affine(_standardised(x, list(range(2, x.ndim)), eps), weight, bias, x.dtype)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    # Its forward mode takes views that a layout with the channels last does not have.
    return torch.group_norm(x.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)


# -- the same with the signatures of torch's own functions, which those of F call -------------------------------------


def _torch_layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _layer_norm(x, normalized_shape, weight, bias, eps)


def _native_layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(normalized_shape), 0))
    return _layer_norm(x, normalized_shape, weight, bias, eps), *_statistics(x, dims, eps, keepdim=True)


def _torch_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    return _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out = _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        return out, x.new_empty(0), x.new_empty(0)
    return out, *_statistics(x, [d for d in range(x.ndim) if d != 1], eps, keepdim=False)


def _torch_instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    return _instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _statistics(x: Tensor, dims: list[int], eps: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=keepdim)
    return mean, (variance + eps).rsqrt()


# -- linear algebra ---------------------------------------------------------------------------------------------------


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """By the inverse, whose second derivative is right."""
    inverse: Tensor = torch.linalg.inv(A)
    if B.ndim == 1 or B.shape == A.shape[:-1]:  # vectors, by torch's own rule
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """One product after the other: torch's formula divides by x, and is wrong where that is 0."""
    x = x if dtype is None else x.to(dtype)
    if x.ndim == 0 or not x.numel() or not _moves(x):
        return torch.cumprod(x, dim)
    return torch.stack(list(accumulate(x.unbind(dim), mul)), dim)


def _cumprod_in_place(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.copy_(_cumprod(x, dim, dtype=dtype))


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
    """In one piece: in chunks, which the options ask for, the derivatives in forward mode are 0."""
    return F.linear_cross_entropy(x, *args, **named)


# -- what belongs to reverse mode -------------------------------------------------------------------------------------


def _requires_grad(x: Tensor, requires_grad: bool = True) -> Tensor:
    """Hooks for activation checkpointing and for adapters ask for it; in a pass without a graph it means nothing."""
    return x


def _grad(*args: Any, **options: Any) -> Any:
    raise NotImplementedError(_way_out("an objective that takes gradients itself (SMART, VAT)"))


#: Whose second derivative torch gets wrong, without an error.
_WRONG = {
    torch.det, Tensor.det, torch.linalg.det, torch.logdet, Tensor.logdet, torch.slogdet, Tensor.slogdet,
    torch.linalg.slogdet, torch.linalg.solve_ex, torch.linalg.tensorsolve, torch.linalg.householder_product,
    torch.orgqr, Tensor.orgqr, torch.cholesky_inverse, Tensor.cholesky_inverse, torch.triangular_solve,
    Tensor.triangular_solve,
}  # fmt: skip
_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    torch.layer_norm: _torch_layer_norm,
    torch.batch_norm: _torch_batch_norm,
    torch.instance_norm: _torch_instance_norm,
    torch.native_layer_norm: _native_layer_norm,
    torch.native_batch_norm: _native_batch_norm,
    torch.linalg.solve: _solve,
    torch.cumprod: _cumprod,
    Tensor.cumprod: _cumprod,
    Tensor.cumprod_: _cumprod_in_place,
    F.silu: _silu,
    F.mish: _mish,
    F.glu: _glu,
    Tensor.requires_grad_: _requires_grad,
    torch.autograd.grad: _grad,
}
if hasattr(F, "linear_cross_entropy"):  # not in torch 2.6
    _WRITTEN_OUT[F.linear_cross_entropy] = _linear_cross_entropy


def _moves(value: Any) -> bool:
    """Whether it is a tensor that depends on the weights; of a constant, all derivatives are 0 and right."""
    return isinstance(value, Tensor) and unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def _multiplies(func: Any, args: Any, named: dict[str, Any]) -> bool:
    """Whether it is the one ``scatter_reduce`` whose derivatives torch takes for 0; the others are right."""
    if func not in (torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_):
        return False
    return "prod" in (named.get("reduce"), *(value for value in args if isinstance(value, str)))


class _Elementary(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if (func in _WRONG or _multiplies(func, args, named)) and any(map(_moves, (*args, *named.values()))):
            raise NotImplementedError(_way_out(func.__name__))
        if func in _WRITTEN_OUT:
            if "input" in named:
                named["x"] = named.pop("input")
            return _WRITTEN_OUT[func](*args, **named)
        return func(*args, **named)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Inside, the model's forward can be differentiated twice in forward mode, correctly.

    Raises:
        NotImplementedError: It holds an operation of which torch has no forward mode.
    """
    try:
        with _Elementary(), sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:  # of which NotImplementedError is one
        lacking = _lacking(str(error))
        if lacking is None:
            raise
        raise NotImplementedError(f"{_way_out(lacking)} ({str(error).splitlines()[0]})") from error


def _way_out(lacking: str) -> str:
    return (
        f"Directional needs the second derivative in forward mode, and torch has none, or a wrong one, of {lacking}: "
        "take another weighting, such as FiniteDifference() or OwnGradient()"
    )


def _lacking(message: str) -> str | None:
    """The operation without a forward mode that an error of torch's speaks of; None if it is about something else."""
    named = re.search(r"forward AD with (\S+) that does not support it", message)
    if named is not None:
        return named[1]
    own = "autograd.Function" in message and ("functorch transforms" in message or "jvp" in message)
    return "an autograd.Function of the model's own" if own else None
