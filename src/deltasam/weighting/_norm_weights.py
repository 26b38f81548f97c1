"""The weights of RW-SAM: they grow exponentially with the norm of each instance's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from deltasam.per_instance import gradient_norms
from deltasam.step.checks import check_number, require_real
from deltasam.step.directions import random_direction
from deltasam.step.norms import global_norm, step_size
from deltasam.step.passes import Passes
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed
from deltasam.weighting._base import Weighting, check_probes
from deltasam.weighting._finite_difference import exact, warn_if_imprecise

Norms = Literal["exact", "finite-difference"]
"""How the norms of the instances' gradients are found."""


@dataclass(frozen=True, kw_only=True)
class NormWeights(Weighting):
    r"""A softmax of the gradient norms of the instances, relative to their mean.

    .. math:: g_i \propto \exp\Bigl(\lambda\, \frac{n_i}{\frac1N \sum_j n_j}\Bigr), \qquad
              n_i = \lVert \nabla l_i(w) \rVert_2

    The division by the mean makes the weights independent of the scale of the loss, so that one :math:`\lambda` serves
    a whole run; it is our choice. The largest exponent is subtracted before the exponential, so nothing overflows.

    With ``norms="finite-difference"`` the norms are estimated along random directions z, one for the whole batch per
    draw, from :math:`E[(z^\top \nabla l_i)^2] = \lVert \nabla l_i \rVert^2`:

    .. math:: n_i^2 \approx \frac1K \sum_{k=1}^K \Bigl(\frac{l_i(w + h z_k) - l_i(w)}{h}\Bigr)^2,
              \qquad z_k \sim N(0, I), \quad \lVert h z_k \rVert_2 = \text{radius}

    One draw multiplies every norm by a random factor, which differs between instances: their order is mostly noise.

    Cost, finite differences: one forward per draw; :math:`l_i(w)` is shared with the gradient pass, unless that pass
    is less precise (autocast, TF32), which takes one more forward. Extra memory: the one copy of the parameters that
    the ascent needs anyway.
    Cost, exact: one forward, and one backward without weight gradients; memory of
    :class:`~deltasam.methods.PerInstanceSAM`. If no rule of the low-rank engine covers the model, one instance at a
    time: N + 1 forwards, N backwards. Models that mix instances (BatchNorm in training) are refused.

    Attributes:
        lam: :math:`\lambda`; 0 gives uniform weights, which is SAM.
        norms: ``"finite-difference"``, as in the paper, or ``"exact"``.
        samples: K, the number of random directions.
        radius: Norm of h z; rho by default.

    References:
        Luo et al., Unveiling m-Sharpness Through the Structure of Stochastic Gradient Noise, NeurIPS 2025
        (arXiv:2509.18001).

    Relations:
        :class:`OwnGradient` weights by curvature times norm, :class:`LossWeights` by the loss.

    Example:
        >>> from deltasam import DeltaSAM
        >>> model, objective = torch.nn.Linear(2, 1, bias=False), lambda model, x: model(x).squeeze(-1)
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # gradients of norm 3 and 1
        >>> step = DeltaSAM(weighting=NormWeights(norms="exact")).backward(model, x, objective)
        >>> round(float((step.weights[0] / step.weights[1]).log()), 4)  # 3/2 - 1/2
        1.0
    """

    lam: float = 1.0
    norms: Norms = "finite-difference"
    samples: int = 1
    radius: float | None = None

    def __post_init__(self) -> None:
        """Checks the options."""
        check_number("lam", self.lam, 0)
        check_probes(self.radius, samples=self.samples)
        if self.norms not in get_args(Norms):
            raise ValueError(f"norms={self.norms!r} must be one of {', '.join(map(repr, get_args(Norms)))}")

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Norms of the gradients, or losses beside w from which they are estimated."""
        require_real(passes.params.values(), passes.params)
        if self.norms == "exact":
            norms = _exact(passes)
            return lambda losses: self._weights(norms, passes)
        radius = rho if self.radius is None else self.radius
        beside, own_center = self._losses_beside(passes, radius, seed)

        def weights(losses: Tensor) -> Tensor:
            passes.branches.join()
            center = losses if own_center is None else own_center
            # The factor 1 / h is the same for all instances: dividing by the mean removes it.
            return self._weights((torch.stack(beside) - center).square().mean(0).sqrt(), passes)

        return weights

    def _losses_beside(self, passes: Passes, radius: Number, seed: Seed) -> tuple[list[Tensor], Tensor | None]:
        """Losses at w + h z, one tensor per draw, and at w if the gradient pass computes those less precisely."""
        params = list(passes.params.values())
        warn_if_imprecise(passes, "their difference is mostly", "norms='exact'")
        beside = []
        with exact(passes, wanted=True) as sharpened:
            for draw in range(self.samples):
                passes.branches.join()
                z = random_direction(params, seed.child(draw))
                with passes.move(params, z, step_size(radius, global_norm(z))):
                    beside.append(passes.losses(concurrent=True))
            return beside, passes.losses(concurrent=True) if sharpened else None

    def _weights(self, norms: Tensor, passes: Passes) -> Tensor:
        """The softmax, up to a factor that all processes share if they ascend together."""
        together = passes.scope == "global"
        mean = passes.ranks.mean(norms.mean()) if together else norms.mean()
        exponents = self.lam * norms / mean
        largest = passes.ranks.largest(exponents.max()) if together else exponents.max()
        return (exponents - largest).exp()


def _exact(passes: Passes) -> Tensor:
    norms = []
    for part in passes.parts(without_side_effects=True):
        part.scope = "local"  # the gradient of an instance concerns no other process
        norms.append(gradient_norms(part))
    return torch.cat(passes.as_in_the_whole(norms, [each.shape[0] for each in norms]))
