"""The paper's weights without the cancellation: exact derivatives along the random direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp

from deltasam._torch import foreach_mul_
from deltasam.parallel.refusals import require_whole
from deltasam.step.checks import require_real
from deltasam.step.directions import random_direction
from deltasam.step.norms import global_norm, step_size
from deltasam.step.passes import Passes
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed
from deltasam.step.unperturbed import CallWrapper
from deltasam.weighting._base import Weighting, check_probes
from deltasam.weighting._forward_mode import twice_differentiable


@dataclass(frozen=True, kw_only=True)
class Directional(Weighting):
    r"""First and second derivative of every loss along r, by forward mode (two nested Jacobian-vector products).

    .. math:: g_i = \frac{|r^\top H_i\, r|}{\max(2\,|\nabla l_i^\top r|, \eta)}, \qquad \lVert r \rVert = \text{radius}

    The limit of :class:`FiniteDifference` (Eq. 5) for small radii, and exact: nothing cancels, so it works in bfloat16
    and under autocast. Several draws are averaged as there.

    Cost: one forward per draw that also computes two derivatives (about the work of four plain forwards, no graph);
    up to three copies of the parameters while it runs. Attention and normalisation run in elementary operations then,
    because torch's fused kernels have no forward mode, or a wrong second derivative. Models with other such operations
    (solvers, determinants, cumulative products) are refused.

    Attributes:
        samples: Number of directions.
        radius: Norm of r, which matters only relative to eta; rho by default.

    Example:
        >>> import torch
        >>> from deltasam import DeltaSAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> DeltaSAM(weighting=Directional()).backward(model, torch.ones(4, 2), objective).weights.shape
        torch.Size([4])
    """

    samples: int = 1
    radius: float | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        check_probes(self.radius, samples=self.samples)

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Derivatives along ``samples`` directions; the losses at w are not needed."""
        radius = rho if self.radius is None else self.radius
        params = list(passes.params.values())
        require_whole("Directional", params)
        require_real(params, passes.params)
        firsts, seconds = [], []
        for draw in range(self.samples):
            r = random_direction(params, seed.child(draw))
            foreach_mul_(r, step_size(radius, global_norm(r)).to(r[0].dtype))
            first, second = derivatives_along(passes, dict(zip(passes.params, r, strict=True)))
            firsts.append(first)
            seconds.append(second)
        second = torch.stack(seconds).mean(0).abs()
        first = 2 * torch.stack(firsts).square().mean(0).sqrt()
        return lambda losses: second / first.clamp_min(eta)


def derivatives_along(passes: Passes, direction: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    r""":math:`\frac{d}{dt} l_i(w + t r)` and :math:`\frac{d^2}{dt^2} l_i(w + t r)` at t = 0, each (N,)."""
    weights = {name: passes.params[name].detach() for name in direction}
    passes.count.forwards += 1
    with torch.no_grad(), passes.extra(), twice_differentiable():
        evaluation = CallWrapper(passes.inner, lambda: passes.evaluate(weights))

        def losses_at(params: dict[str, Tensor]) -> Tensor:
            moved = {f"model.{n}": p for n, p in params.items()}
            # A forward may write to buffers, which torch allows inside a transform only for tensors made there.
            moved |= {f"model.{n}": b.clone() for n, b in passes.inner.named_buffers()}
            losses: Tensor = functional_call(evaluation, moved, (), tie_weights=True)
            return losses

        # The direction itself is the tangent, twice. With w + t r and a number t, the products of t with every
        # parameter take longer than the model if the host is the limit (three times, for a tiny BERT of four layers).
        both: Any = jvp(lambda w: jvp(losses_at, (w,), (direction,)), (weights,), (direction,))
    (_, first), (_, second) = both
    return first, second
