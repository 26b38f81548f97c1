"""Compares the graph of a compiled model with the proxies, once per graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deltasam.per_instance.algebra.factors import Dense, Factor, LowRank, Packed
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.compiling.errors import NotCompilableError

#: Relative differences that rounding explains; both ways run nearly the same operations.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
_RISE = 0.1  # of the loss in the perturbed pass


def compare_recordings(
    found: tuple[Tensor, InstanceGradients], expected: tuple[Tensor, InstanceGradients], tolerance: float
) -> None:
    """Raises NotCompilableError if losses, or norms of the gradients of a parameter, differ.

    A layer may be kept in another form, with or without its bias: such a bias counts in the norm of all.
    """
    _compare("losses", found[0], expected[0], expected[0].abs().max(), tolerance)
    total = expected[1].norms()
    _compare("gradients", found[1].norms().to(total), total, total, tolerance)
    mine, theirs = (_without_biases(gradients) for _, gradients in (found, expected))
    norms = [gradients.norms_of_each() for gradients in (mine, theirs)]
    for name in mine.factors.keys() | theirs.factors.keys():
        here, there = (each.get(name) for each in norms)
        if here is None or there is None:
            if not _is_vector((mine if there is None else theirs).factors[name]):
                raise NotCompilableError("its graph and the model do not use the same parameters")
            continue
        _compare("gradients", here.to(total), there.to(total), 1e-2 * total + there.to(total), tolerance)


def _without_biases(gradients: InstanceGradients) -> InstanceGradients:
    factors = {
        name: [replace(factor, bias=False) if isinstance(factor, LowRank) else factor for factor in found]
        for name, found in gradients.factors.items()
    }
    return replace(gradients, factors=factors)


def _is_vector(factors: Sequence[Factor]) -> bool:
    return all(
        isinstance(factor, Packed) or (isinstance(factor, Dense) and factor.value.ndim == 2) for factor in factors
    )


def compare_perturbed(found: Tensor, expected: Tensor, before: Tensor, tolerance: float) -> None:
    """Raises NotCompilableError if perturbed losses differ; ``before`` are those at w."""
    rounding = 200 * torch.finfo(expected.dtype).eps * (1 + expected.abs().max())
    _compare("perturbed losses", found, expected, (expected - before).norm() + rounding / tolerance, tolerance)


def coefficients(losses: Tensor, norms: Tensor, scale: Tensor) -> Tensor:
    """Coefficients (G,) of a visible perturbation; the norms have the loss scale."""
    radius = _RISE * losses.abs().mean() / (norms / scale).mean()
    return (radius / norms).nan_to_num(0.0, 0.0, 0.0)


def tolerance_of(losses: Tensor, gradients: InstanceGradients) -> float:
    """How far two ways to the same numbers may be apart in the precision of these."""
    dtypes = {losses.dtype}
    for factors in gradients.factors.values():
        dtypes |= {getattr(factor, "d", losses).dtype for factor in factors}
    return max(_TOLERANCE.get(dtype, 0.2) for dtype in dtypes)


def _compare(what: str, found: Tensor, expected: Tensor, size: Tensor, tolerance: float) -> None:
    apart = (found - expected).abs()
    finite = torch.isfinite(apart)  # an overflow proves nothing
    if bool((apart > tolerance * size).logical_and(finite).any()):
        raise NotCompilableError(f"the {what} of its graph differ from those of the model")
