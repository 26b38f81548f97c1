"""Arithmetic on lists of tensors, one tensor per parameter: norms, inner products, sums, and the size of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor

from deltasam._torch import foreach_norm
from deltasam.parallel.shards import any_shard, local, total, totals

_STRETCH = 2**16  # elements; float32 can add up as many one after the other
_ALONE = {torch.float32}
_device, _dtype, _is_sparse = attrgetter("device"), attrgetter("dtype"), attrgetter("is_sparse")


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, shards of other processes included.

    It is accumulated in float32 at least, on the first one's device, to a relative error of a few 1e-6 however many
    entries there are.
    """
    if not tensors:
        return torch.zeros((), device="cpu")
    sharded = any_shard(tensors)
    values = _values(tensors, sharded)
    norms = _norms(values, _wide_enough(values))
    if sharded:
        return total([(n.square(), t) for n, t in zip(norms, tensors, strict=True)]).sqrt()
    norm: Tensor = torch.linalg.vector_norm(_stacked(norms))
    return norm


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of every tensor, shape (K,), shards of other processes included; on the first one's device."""
    sharded = any_shard(tensors)
    values = _values(tensors, sharded)
    found = _stacked(_norms(values, _wide_enough(values)))
    return totals(found.square(), tensors).sqrt() if sharded else found


def _values(tensors: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """The values of the tensors that this process holds; of a sparse tensor those that are not zero."""
    if not sharded and not any(map(_is_sparse, tensors)):
        return list(tensors)
    return [t.coalesce().values() if t.is_sparse else local(t) for t in tensors]


def _stacked(norms: list[Tensor]) -> Tensor:
    """The norms on the device of the first one."""
    alike = len(set(map(_device, norms))) == 1
    return torch.stack(norms if alike else [n.to(norms[0].device) for n in norms])


def _wide_enough(tensors: Sequence[Tensor]) -> torch.dtype:
    """A dtype that holds the values of all tensors, float32 at least: the parts of a model may differ in theirs."""
    dtypes = set(map(_dtype, tensors))
    return torch.float32 if dtypes == _ALONE else reduce(torch.promote_types, dtypes, torch.float32)


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor.

    On a CPU torch adds the squares of a float32 tensor one after the other: over the 23 million entries of BERT's word
    embeddings the norm loses 0.3%, over 100 million 3%. There, large tensors are split into stretches (views).
    """
    if max(map(Tensor.numel, tensors)) <= _STRETCH or not any(_is_long(t) for t in tensors):
        return list(foreach_norm(tensors, 2, dtype=dtype))
    pieces = [_stretches(t) for t in tensors]
    norms = iter(foreach_norm([piece for each in pieces for piece in each], 2, dtype=dtype))
    found = [list(islice(norms, len(each))) for each in pieces]
    return [each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each)) for each in found]


def _is_long(tensor: Tensor) -> bool:
    return tensor.numel() > _STRETCH and tensor.is_cpu


def _stretches(tensor: Tensor) -> tuple[Tensor, ...]:
    if not _is_long(tensor):
        return (tensor,)
    longest = max(tensor.shape)
    return torch.split(tensor, max(1, _STRETCH * longest // tensor.numel()), tensor.shape.index(longest))


def dot(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> Tensor:
    """The inner product of two lists of tensors, shards of other processes included; None is zero."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return torch.zeros((), device="cpu")
    dtype = _wide_enough([a for a, _ in pairs])
    return total([((dense(local(a)).to(dtype) * dense(local(b)).to(dtype)).sum(), a) for a, b in pairs])


def dense(tensor: Tensor) -> Tensor:
    """The tensor, converted to a dense one if it is sparse."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def combine(a: Tensor, first: Tensor | None, b: Tensor, second: Tensor | None) -> Tensor | None:
    """``a * first + b * second`` with scalars a and b; None is zero, and so is a term whose factor is exactly zero.

    The latter keeps a gradient that is not finite out of the sum when the method has decided not to use it. The sum of
    two sparse tensors is sparse.
    """
    terms = [_times(factor, value) for factor, value in ((a, first), (b, second)) if value is not None]
    terms.sort(key=lambda term: term.is_sparse)  # torch adds a sparse tensor to a dense one, not the other way round
    return sum(terms[1:], start=terms[0]) if terms else None


def _times(factor: Tensor, value: Tensor) -> Tensor:
    if value.is_sparse:
        value = value.coalesce()
        scaled = _times(factor, value.values())
        return torch.sparse_coo_tensor(value.indices(), scaled, value.shape, is_coalesced=True, check_invariants=False)
    return masked_product(value, factor.to(value.device, value.dtype))


def masked_product(value: Tensor, factor: Tensor) -> Tensor:
    """``value * factor``, and zero where the factor is zero, even if the value is not finite there."""
    return torch.where(factor == 0, torch.zeros_like(value), value * factor)


def step_size(rho: float | Tensor, norm: Tensor) -> Tensor:
    """The radius over the norm; 0 where the norm is zero, not finite, or too small to divide by."""
    # Over an infinite norm it is zero already.
    return (rho / norm).to(norm.dtype).nan_to_num(0.0, 0.0, 0.0)
