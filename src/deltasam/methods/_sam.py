"""SAM (sharpness-aware minimization): one perturbation for the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._fields import radius
from deltasam.methods._step import Step, make_step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class SAM(Method):
    r"""SAM, Eq. 1: the gradient at :math:`w + \epsilon^*`, one ascent step away from w.

    .. math:: \epsilon^* = \rho \, \nabla l(w) / \lVert \nabla l(w) \rVert_2, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon^*)

    Cost: 2 forwards, 2 backwards; one extra copy of the perturbed parameters.

    Attributes:
        rho: Radius of the perturbation; 0 is plain training, at its cost.

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.

    Relations:
        :class:`DeltaSAM` with ``Uniform`` weights; :class:`PerInstanceSAM` with ``group=N``.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SAM(rho=0.05).backward(model, torch.ones(4, 2), objective)
        >>> step.forwards, step.backwards, bool(step.sharpness > 0)
        (2, 2, True)
    """

    rho: Rho = radius()
    uses_direction_only = True

    def _step(self, passes: Passes) -> Step:
        losses, grads = passes.gradient()
        with passes.ascend(grads, self.radius) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
