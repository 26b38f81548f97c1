"""Gradient-norm penalty: the loss plus a weight times the norm of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._mixture import mixed_step
from deltasam.methods._step import Step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class GradientNormPenalty(Method):
    r"""Penalises the norm of the gradient; a finite difference of length :math:`\rho` replaces the Hessian.

    .. math:: \min_w\ l(w) + \lambda \lVert \nabla l(w) \rVert_2, \qquad
              \nabla \lVert \nabla l \rVert_2 = H \frac{g}{\lVert g \rVert_2} \approx \frac{g_p - g}{\rho}

    .. math:: \text{gradient} = (1 - \alpha)\, g + \alpha\, g_p, \qquad \alpha = \lambda / \rho, \qquad
              g = \nabla l(w), \quad g_p = \nabla l(w + \rho\, g / \lVert g \rVert_2)

    The authors' code has an option ``norm_perturbations``, on by default, that replaces g by
    :math:`g / \lVert g \rVert_2` in the sum. Here the sum is that of the paper.

    Cost: 2 forwards, 2 backwards; two extra copies of the parameters (one is the plain gradient).

    Attributes:
        rho: Length of the finite difference, the paper's r; 0 is plain training.
        alpha: :math:`\lambda / \rho`, the weight of the penalty; 0 is plain training, 1 is SAM. At a fixed alpha the
            penalty :math:`\lambda` grows with rho.

    References:
        Zhao et al., Penalizing Gradient Norm for Efficiently Improving Generalization in Deep Learning, ICML 2022.

    Relations:
        :class:`SAM` with ``alpha=1``; :class:`WSAM` with ``gamma = alpha / (1 + alpha)``.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = GradientNormPenalty(rho=0.05, alpha=0.8).backward(model, torch.ones(4, 2), objective)
        >>> step.forwards, step.backwards, bool(step.sharpness > 0)
        (2, 2, True)
    """

    rho: Rho = radius()
    alpha: float = number(0.8)
    edits_gradient = True

    def is_erm(self) -> bool:
        """Whether the difference has no length, or the penalty no weight."""
        return super().is_erm() or self.alpha == 0

    def _step(self, passes: Passes) -> Step:
        return mixed_step(passes, self.radius, self.alpha)
