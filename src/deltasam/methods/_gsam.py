"""Surrogate-gap guided SAM: descends the perturbed loss and the surrogate gap together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.norms import combine, dot
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class GSAM(Method):
    r"""GSAM: the perturbed gradient, minus the part of the plain gradient that is orthogonal to it.

    .. math:: g = \nabla l(w), \quad g_p = \nabla l(w + \rho\, g / \lVert g \rVert), \quad
              \text{gradient} = g_p - \alpha\, g_\perp, \quad
              g_\perp = g - \frac{\langle g, g_p \rangle}{\lVert g_p \rVert^2}\, g_p

    Cost: 2 forwards, 2 backwards; two extra copies of the parameters (one is the plain gradient).

    In the paper rho follows the learning rate: ``rho=Scheduled(rho_max, after="lr", end=rho_min / rho_max)``, or
    ``method.replace(rho=GSAM.rho_at(...))`` before each step.

    Attributes:
        rho: Radius of the perturbation.
        alpha: Weight of the orthogonal part; 0 is SAM.

    References:
        Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, ICLR 2022.

    Example:
        >>> round(GSAM.rho_at(lr=5e-5, lr_max=1e-4, rho_max=0.05, rho_min=0.01), 6)
        0.03
    """

    rho: Rho = radius()
    alpha: float = number(0.4)
    edits_gradient = True

    @staticmethod
    def rho_at(*, lr: float, lr_max: float, rho_max: float, rho_min: float, lr_min: float = 0.0) -> float:
        """The radius for a learning rate: both are at the same relative position in their ranges.

        Raises:
            ValueError: ``lr_max`` is not greater than ``lr_min``.
        """
        if not lr_max > lr_min:
            raise ValueError(f"lr_max={lr_max} must be greater than lr_min={lr_min}")
        return rho_min + (rho_max - rho_min) * (lr - lr_min) / (lr_max - lr_min)

    def _step(self, passes: Passes) -> Step:
        # The orthogonal part is over everything that is trained, even if only some parameters are perturbed.
        losses, plain = passes.gradient(params=list(passes.involved.values()))
        g = dict(zip(passes.involved, plain, strict=True))
        del plain
        with passes.fresh_grads() as trained:
            with passes.ascend([g[name] for name in passes.params], self.radius, consume=False) as ascent:
                perturbed = passes.accumulate()
            g = {name: g[name] for name in trained}  # without those of frozen parameters
            with torch.no_grad():
                gp = {name: p.grad for name, p in trained.items()}
                share = dot(list(g.values()), list(gp.values())) / dot(list(gp.values()), list(gp.values()))
                # After a skipped ascent gp = g, and there is no orthogonal part.
                unusable = ascent.skipped | ~torch.isfinite(share)
                alpha = torch.where(unusable, torch.zeros_like(share), self.alpha * torch.ones_like(share))
                keep = 1 + torch.where(unusable, torch.zeros_like(share), alpha * share)
                for name, p in trained.items():  # popped one by one, so that no third copy of the gradient is held
                    p.grad = combine(keep, gp.pop(name), -alpha, g.pop(name))
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
