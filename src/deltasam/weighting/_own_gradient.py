"""The weights of the theory: the curvature along each instance's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from deltasam.per_instance import both_sides
from deltasam.step.checks import require_real
from deltasam.step.passes import Passes
from deltasam.step.radius import Number
from deltasam.step.randomness import Seed
from deltasam.weighting._base import Weighting, check_probes
from deltasam.weighting._finite_difference import exact


@dataclass(frozen=True, kw_only=True)
class OwnGradient(Weighting):
    r""":math:`g_i = a_i \lVert \nabla l_i \rVert` without a random direction.

    In the paper :math:`g_i = a_i \lVert \nabla l_i(w) \rVert_2` with :math:`H_i = a_i \nabla l_i \nabla l_i^\top`. It
    is estimated there along one random r for the whole batch (Eq. 5), which multiplies it by noise. Along
    :math:`u_i = \nabla l_i / \lVert \nabla l_i \rVert`, which differs between the instances of one pass, it is

    .. math:: a_i \lVert \nabla l_i \rVert = \frac{u_i^\top H_i u_i}{\lVert \nabla l_i \rVert}, \qquad
              g_i = \frac{|l_i(w + h u_i) + l_i(w - h u_i) - 2 l_i(w)|}{\max(2 h \lVert \nabla l_i \rVert, \eta)}
              \to \frac h2\, a_i \lVert \nabla l_i \rVert,

    which is Eq. 5 with an exact norm and a separate direction for every instance; the constant cancels in the
    perturbation. The second difference is about :math:`d` (the number of parameters) times larger than along a random
    r, and so above rounding errors.

    Cost: 3 forwards and a backward without weight gradients; memory of :class:`~deltasam.methods.PerInstanceSAM`.
    If no rule of the low-rank engine covers the model, one instance at a time: 3N + 1 forwards, N backwards,
    with dropout each over the whole batch.

    Attributes:
        radius: h; rho by default.
        precision: ``"float32"``: without autocast and TF32; ``"ambient"``: in the precision of the other passes.

    Relations:
        :class:`FiniteDifference` is the estimate along a random direction.

    Example:
        >>> import torch
        >>> from deltasam import DeltaSAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> DeltaSAM(weighting=OwnGradient()).backward(model, torch.ones(4, 2), objective).weights.shape
        torch.Size([4])
    """

    radius: float | None = None
    precision: Literal["float32", "ambient"] = "float32"

    def __post_init__(self) -> None:
        """Checks the options."""
        check_probes(self.radius, precision=self.precision)

    def probe(self, passes: Passes, *, rho: Number, eta: float, seed: Seed) -> Callable[[Tensor], Tensor]:
        """Losses on both sides of w along each instance's own gradient; the losses at w come with the gradient."""
        radius = rho if self.radius is None else self.radius
        require_real(passes.params.values(), passes.params)
        seconds, slopes = [], []
        with exact(passes, self.precision == "float32"):
            for part in passes.parts(without_side_effects=True):
                losses, norms, plus, minus = both_sides(part, radius)
                # In half precision the slope must cancel first: the curvature is a small difference of the sides.
                seconds.append((plus + minus - 2 * losses).abs())
                slopes.append((2 * radius * norms).to(losses.dtype))
        # eta bounds the slopes of the losses as they are in the whole batch: a mean over tokens differs in its parts.
        g = passes.joined(seconds) / passes.joined(slopes).clamp_min(eta)
        return lambda losses: g
