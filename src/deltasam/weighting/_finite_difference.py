"""The paper's weights: differences of the losses at w + r and w - r."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deltasam._torch import CONVOLUTION
from deltasam.step.checks import require_real
from deltasam.step.directions import random_direction
from deltasam.step.float32 import full_float32, rounded
from deltasam.step.fused.products import fast_products
from deltasam.step.norms import global_norm, step_size
from deltasam.step.passes import Passes
from deltasam.step.precision import casts_inside, gathered_as, no_autocast
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed
from deltasam.weighting._base import Weighting, check_probes


@dataclass(frozen=True, kw_only=True)
class FiniteDifference(Weighting):
    r"""Eq. 5 with one or several random directions :math:`r \sim N(0, I)`, rescaled to norm ``radius``.

    .. math:: g_i = \frac{|l_i(w+r) + l_i(w-r) - 2 l_i(w)|}{\max(|l_i(w+r) - l_i(w-r)|, \eta)}

    With several draws the numerator is the absolute mean of the second differences and the denominator the root mean
    square of the first: the expectations that the paper derives the formula from.

    Cost: 2 forwards per draw without a graph; :math:`l_i(w)` is shared with the gradient pass. If that pass is less
    precise than the probes (autocast; TF32, which is torch's default for convolutions on a GPU), one more forward.
    Extra memory: the one copy of the parameters that the ascent needs anyway; one more in a recorded step.

    Attributes:
        samples: Number of directions.
        radius: Norm of r; rho by default, as in the paper. On real models the second difference at that radius is
            about as small as the rounding error of float32 or smaller (``deltasam analyze weights`` measures it for
            your model); with a larger radius it is above.
        precision: ``"float32"``: probes run without autocast and TF32. In a captured step on an A100, H100 or newer
            their linear layers use tensor cores, as exactly as float32 (``deltasam.step.fused.products``).
            ``"ambient"``: in the precision of the other passes, which needs no extra forward, but in bfloat16 makes
            the weights noise.

    References:
        Zhou et al., Sharpness-Aware Minimization with Dynamic Reweighting, Findings of EMNLP 2022, Eq. 5.

    Relations:
        :class:`Directional` is the limit of a small radius without the cancellation.

    Example:
        >>> import torch
        >>> from deltasam import DeltaSAM
        >>> method = DeltaSAM(rho=0.05, eta=1e-4, weighting=FiniteDifference(samples=2, radius=0.5))
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = method.backward(model, torch.ones(4, 2), objective)
        >>> step.weights.shape, step.forwards
        (torch.Size([4]), 6)
    """

    samples: int = 1
    radius: float | None = None
    precision: Literal["float32", "ambient"] = "float32"

    def __post_init__(self) -> None:
        """Checks the options."""
        check_probes(self.radius, samples=self.samples, precision=self.precision)

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Losses on both sides of w, ``samples`` times."""
        params = list(passes.params.values())
        require_real(params, passes.params)
        warn_if_imprecise(passes, "their second difference is mostly", "weighting=Directional()")
        radius = rho if self.radius is None else self.radius
        sides: list[tuple[Tensor, Tensor]] = []
        with exact(passes, self.precision == "float32") as sharpened:
            for draw in range(self.samples):
                passes.branches.join()  # of the previous draw, so that its two copies of the weights are freed
                with passes.branches.prepare():  # the pass at w waits neither for r nor for the moves
                    r = random_direction(params, seed.child(draw))
                    passes.branches.keep(r)
                    size = step_size(radius, global_norm(r))
                    with passes.move(params, r, size, mirrored=True) as moved:
                        plus = passes.losses(concurrent=True)
                        moved.mirror()
                        sides.append((plus, passes.losses(concurrent=True)))
            own_center = passes.losses(concurrent=True) if sharpened else None

        def weights(losses: Tensor) -> Tensor:
            passes.branches.join()
            center = losses if own_center is None else own_center
            return difference_weights(center, [p for p, _ in sides], [m for _, m in sides], eta)

        return weights


def difference_weights(center: Tensor, plus: list[Tensor], minus: list[Tensor], eta: float) -> Tensor:
    """Eq. 5 from the losses at w and on both sides of it, each (N,); one pair per draw."""
    b, c = torch.stack(plus), torch.stack(minus)
    second = (b + c - 2 * center).mean(0).abs()
    first = (b - c).square().mean(0).sqrt()
    return second / first.clamp_min(eta)


@contextmanager
def exact(passes: Passes, wanted: bool) -> Iterator[bool]:
    """Switches autocast and TF32 off if wanted; yields whether that makes a difference."""
    device = passes.device
    tf32 = wanted and _is_rounded(passes.model, device)
    if not wanted or not (tf32 or torch.is_autocast_enabled(device.type)):
        yield False
        return
    with full_float32(device) if tf32 else nullcontext(), no_autocast(device), fast_products(passes.model, device):
        yield True


def _is_rounded(model: nn.Module, device: torch.device) -> bool:
    """Whether the model computes float32 as TF32. TF32 for convolutions, the default, matters only if it has some."""
    kinds = rounded(device)
    if not kinds or "matmul" in kinds:
        return bool(kinds)
    return any(isinstance(module, (CONVOLUTION, nn.RNNBase)) for module in model.modules())


def warn_if_imprecise(passes: Passes, lost: str, instead: str) -> None:
    """Warns if the losses of probes are computed in half precision.

    Args:
        passes: The passes of the step.
        lost: What is rounding then.
        instead: The option that needs no probes at moved weights.
    """
    stored = next(iter(passes.params.values())).dtype
    gathered = gathered_as(passes.inner) if passes.ranks.sharded else None
    halves = (torch.bfloat16, torch.float16)
    if stored in halves:
        cause, remedy = f"the weights are {stored}", "keep float32 weights (and use autocast), or pass"
    elif gathered in halves:
        cause = f"FSDP gathers the weights in {gathered}"
        remedy = "leave param_dtype out of MixedPrecisionPolicy (and use autocast), or pass scope='local' and"
    elif casts_inside(passes.inner):
        name = type(passes.inner).__name__
        cause = f"autocast decorates the forward of {name}, as Accelerate's mixed_precision does"
        remedy = "put torch.autocast around the step instead, or pass"
    else:
        return
    warnings.warn(
        f"{cause}, so the probes' losses are computed in half precision and {lost} rounding: {remedy} {instead}",
        stacklevel=2,
    )
