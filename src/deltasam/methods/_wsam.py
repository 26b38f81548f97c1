"""WSAM (weighted SAM): the loss plus a weight times its sharpness."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._mixture import mixed_step
from deltasam.methods._step import Step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class WSAM(Method):
    r"""WSAM: sharpness is a regularisation term, whose weight :math:`\gamma / (1 - \gamma)` need not be SAM's 1.

    .. math:: \min_w\ l(w) + \frac{\gamma}{1 - \gamma} \bigl[l(w + \epsilon^*) - l(w)\bigr], \qquad
              \epsilon^* = \rho\, g / \lVert g \rVert_2

    .. math:: \text{gradient} = \frac{1 - 2\gamma}{1 - \gamma}\, g + \frac{\gamma}{1 - \gamma}\, g_p, \qquad
              g = \nabla l(w), \quad g_p = \nabla l(w + \epsilon^*)

    With :math:`\gamma > 1/2` the factor of g is negative, and the gradient goes past SAM's.

    This is the *coupled* form of the paper, where the optimizer gets the gradient of both terms. The authors' code has
    it as ``decouple=False``. Its default is the decoupled form: the optimizer gets g, and then the weights move by
    :math:`-\text{lr}\, \gamma / (1 - \gamma)\, (g_p - g)`. That needs the learning rate, and methods do not touch the
    optimizer. With plain SGD both forms are the same. That code also clips both gradients before it combines them.

    Cost: 2 forwards, 2 backwards; two extra copies of the parameters (one is the plain gradient).

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.
        gamma: Weight of the sharpness, at least 0 and less than 1; 0 is plain training, 0.5 is SAM.

    References:
        Yue et al., Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization Term, KDD 2023.

    Relations:
        :class:`GradientNormPenalty` with ``alpha = gamma / (1 - gamma)``; :class:`SAM` with ``gamma=0.5``.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = WSAM(rho=0.05, gamma=0.8).backward(model, torch.ones(4, 2), objective)
        >>> step.forwards, step.backwards, bool(step.sharpness > 0)
        (2, 2, True)
    """

    rho: Rho = radius()
    gamma: float = number(0.9, high=1, open_high=True)
    edits_gradient = True

    def is_erm(self) -> bool:
        """Whether there is no perturbation, or its weight is 0."""
        return super().is_erm() or self.gamma == 0

    def _step(self, passes: Passes) -> Step:
        return mixed_step(passes, self.radius, self.gamma / (1 - self.gamma))
