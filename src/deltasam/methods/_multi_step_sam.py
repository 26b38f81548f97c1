"""Multi-step SAM: several projected ascent steps instead of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.norms import combine, global_norm, step_size
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class MultiStepSAM(Method):
    r"""SAM with K ascent steps, each projected onto the ball of radius rho.

    .. math:: \epsilon_0 = 0, \qquad
              \epsilon_k = \Pi_\rho\Bigl(\epsilon_{k-1} + s \rho\,
              \frac{\nabla l(w + \epsilon_{k-1})}{\lVert \nabla l(w + \epsilon_{k-1}) \rVert_2}\Bigr), \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon_K)

    K = 1 with s = 1 is SAM. All steps see the same batch. Every perturbation is added to the weights at w, so no
    rounding accumulates over the steps. A later gradient that is zero or not finite adds nothing to
    :math:`\epsilon`.

    Cost: K + 1 forwards, K + 1 backwards; two extra copies of the parameters (:math:`w` and :math:`\epsilon`), three
    for a moment.

    Attributes:
        rho: Radius of the ball; 0 is plain training.
        ascent_steps: K.
        stride: s, the length of an ascent step as a multiple of rho; by default 1 for one step and 2 / K for several,
            which reach the boundary and can turn there.

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021 (the appendix
        has several inner steps). Kim et al., Exploring the Effect of Multi-step Ascent in Sharpness-Aware
        Minimization, 2023 (arXiv:2302.10181).

    Relations:
        ``optax.contrib.sam(sync_period=K + 1)`` makes K steps, too. It does not project: K steps of length rho reach
        up to K rho. Its adversarial steps may see other batches. For a perturbation per instance see
        :func:`~deltasam.per_instance.instance_adversarial_losses`.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = MultiStepSAM(rho=0.05, ascent_steps=3).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards
        (4, 4)
    """

    rho: Rho = radius()
    ascent_steps: int = number(2, low=1, whole=True)
    stride: float | None = number(None, open_low=True, optional=True)
    cost = "K+1/K+1"
    uses_direction_only = True

    def _step(self, passes: Passes) -> Step:
        stride = self.stride or (1.0 if self.ascent_steps == 1 else 2 / self.ascent_steps)
        losses, grads = passes.gradient()
        # The direction is eps / rho times the norm of the first gradient. So it has the loss scale, as gradients have,
        # its length is at most that norm, and with one step it is the gradient itself.
        first, at_w = _norm(grads, passes), passes.followed.loss
        direction: list[Tensor | None] = [None] * len(grads)
        direction = _climbed(direction, torch.full_like(first, stride), grads, first)
        for _ in range(self.ascent_steps - 1):
            with passes.ascend(direction, self.radius, norm=first, consume=False):
                _, grads = passes.gradient(keep_side_effects=False)
            passes.followed.loss = at_w  # radii in units of the loss are those at w
            direction = _climbed(direction, first * step_size(stride, _norm(grads, passes)), grads, first)
        with passes.ascend(direction, self.radius, norm=first) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


def _norm(tensors: Sequence[Tensor | None], passes: Passes) -> Tensor:
    return global_norm([t for t in tensors if t is not None]).to(passes.device)


@torch.no_grad()
def _climbed(
    direction: list[Tensor | None], size: Tensor, grads: list[Tensor | None], most: Tensor
) -> list[Tensor | None]:
    """``direction + size * grads``, shortened to the length ``most``. The gradients are consumed."""
    one = torch.ones_like(size)
    for k in reversed(range(len(direction))):  # one by one: a third copy is held of one tensor only
        direction[k] = combine(one, direction[k], size, grads.pop())
    # 0 / 0 where nothing has moved yet.
    length = global_norm([d for d in direction if d is not None]).to(most.device)
    shrink = (most / length).clamp_max(1).nan_to_num(1.0)
    return [combine(shrink, d, one, None) for d in direction]
