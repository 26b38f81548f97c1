"""Adaptive SAM: the radius scales with the size of each weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.passes import Passes, direction_norms
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class ASAM(Method):
    r"""ASAM: SAM in the norm :math:`\lVert T_w^{-1} \epsilon \rVert_2 \le \rho`, invariant to rescaling the weights.

    .. math:: \epsilon^* = \rho \, T_w^2 \nabla l(w) / \lVert T_w \nabla l(w) \rVert_2, \qquad T_w = |w| + \eta

    :math:`T_w = 1` for parameters whose name does not contain "weight" (biases), as in the authors' code. Other
    libraries omit eta and treat biases like weights, so a radius tuned there does not carry over.

    Cost: 2 forwards, 2 backwards; one extra copy of the parameters, a second one briefly between the passes.

    Attributes:
        rho: Radius in the adaptive norm, about ten times SAM's (0.5 in the paper on CIFAR-10).
        eta: Allows weights near zero to move.

    References:
        Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021.

    Example:
        >>> model, objective = nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> ASAM(rho=0.5).backward(model, torch.ones(4, 2), objective).backwards
        2
    """

    rho: Rho = radius(0.5)
    eta: float = number(0.01)
    uses_direction_only = True
    plain_ascent = False

    def _step(self, passes: Passes) -> Step:
        losses, grads = passes.gradient()
        stretched = [
            None if g is None else self._stretch(name, p, g)
            for (name, p), g in zip(passes.params.items(), grads, strict=True)
        ]
        del grads
        norms = direction_norms(stretched).to(passes.device)
        direction = [
            None if s is None else self._stretch(name, p, s)
            for (name, p), s in zip(passes.params.items(), stretched, strict=True)
        ]
        del stretched
        with passes.ascend(direction, self.radius, norm=torch.linalg.vector_norm(norms), norms=norms) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    @torch.no_grad()
    def _stretch(self, name: str, p: nn.Parameter, value: Tensor) -> Tensor:
        """T_w times a value."""
        dense = value.to_dense() if value.is_sparse else value
        return (p.abs() + self.eta) * dense if "weight" in name else dense
