"""Friendly SAM: subtracts the average gradient of earlier steps from the ascent direction."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class FriendlySAM(Method):
    r"""F-SAM: SAM without the full gradient in its ascent; an average over steps estimates the full gradient.

    .. math:: m_t = \lambda\, m_{t-1} + (1 - \lambda) \nabla l(w), \qquad d = \nabla l(w) - \sigma\, m_t, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \rho\, d / \lVert d \rVert_2)

    with :math:`m_0 = 0`, so the first step is SAM. Public code differs: it starts with
    :math:`m_1 = \nabla l(w)` and subtracts :math:`m_{t-1}`.

    Cost: 2 forwards, 2 backwards; one extra copy of the parameters, a second one briefly between the passes, and one
    that is kept (``average``, in :meth:`state_dict`).

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.
        sigma: How much of the average is subtracted; 0 is SAM.
        decay: :math:`\lambda`, the decay of the average; with 1 the average stays 0, which is SAM.

    References:
        Li et al., Friendly Sharpness-Aware Minimization, CVPR 2024.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = FriendlySAM(rho=0.05)
        >>> step = method.backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, sorted(method.state_dict()["average"])
        (2, 2, ['bias', 'weight'])
    """

    rho: Rho = radius()
    sigma: float = number(1.0)
    decay: float = number(0.9, high=1)
    buffers = ("average",)

    def _step(self, passes: Passes) -> Step:
        losses, grads = passes.gradient()
        average = self.buffer("average", passes)
        average.update(grads, self.decay)
        pairs = zip(grads, average, strict=True)
        direction = [None if g is None else g.to_dense() - self.sigma * m for g, m in pairs]
        del grads
        with passes.ascend(direction, self.radius) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
