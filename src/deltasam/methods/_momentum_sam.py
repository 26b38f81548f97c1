"""Momentum-SAM: perturbs along the gradients of earlier steps, at the cost of plain training."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class MomentumSAM(Method):
    r"""MSAM: the gradient at a point along the momentum of earlier gradients; one pass per step.

    .. math:: \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w - \rho\, m_{t-1} / \lVert m_{t-1} \rVert_2),
              \qquad m_t = \mu\, m_{t-1} + (1 - \mu)\, \text{gradient}

    The sign is the paper's: the momentum is subtracted, as in Nesterov's look-ahead. In the paper m is the momentum of
    the optimizer. Here the method keeps an average of the gradients that it has returned; it has the same direction as
    the momentum of SGD without weight decay. The first step has no momentum: it is plain training, and counts as
    skipped.

    Cost: 1 forward, 1 backward; one extra copy of the perturbed parameters, a second one briefly before the pass, and
    one that is kept (``momentum``, in :meth:`state_dict`). No pass is made at w: ``step.losses`` and
    ``step.perturbed_losses`` are both those at the perturbed weights. Sharded parameters (FSDP2) need
    ``scope="global"``.

    Attributes:
        rho: Radius of the perturbation; 0 is plain training. The default is that of the authors' code.
        decay: :math:`\mu`, the decay of the momentum.

    References:
        Becker et al., Momentum-SAM: Sharpness Aware Minimization without Computational Overhead, 2024.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = MomentumSAM(rho=0.3)
        >>> steps = [method.backward(model, torch.rand(4, 2), objective) for _ in range(2)]
        >>> [(step.forwards, step.backwards, bool(step.skipped)) for step in steps]
        [(1, 1, True), (1, 1, False)]
    """

    rho: Rho = radius(0.3)
    decay: float = number(0.9, high=1)
    cost = "1/1"
    buffers = ("momentum",)
    edits_gradient = True
    follows_gradient = False

    def _step(self, passes: Passes) -> Step:
        passes.ranks.check(self.scope, passes.params)
        frozen = [name for name in passes.params if name not in passes.trainable]
        if frozen:
            raise ValueError(
                f"params={self.params!r} selects {frozen[0]!r}, which is frozen: MomentumSAM follows the gradients "
                "that train the model, and frozen weights have none; use params='trained', or another method"
            )
        momentum = self.buffer("momentum", passes)
        with passes.fresh_grads():
            with passes.ascend(list(momentum), -self.radius) as ascent:
                losses = passes.accumulate(keep_side_effects=True)
            momentum.update([p.grad for p in passes.params.values()], self.decay)
        return make_step(passes, losses, perturbed=losses, ascent=ascent)
