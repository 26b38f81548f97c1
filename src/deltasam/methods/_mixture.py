"""The step of methods whose gradient lies on the line through the plain gradient and SAM's."""

from __future__ import annotations

import torch

from deltasam.methods._step import Step, make_step
from deltasam.step.gradients import added
from deltasam.step.norms import combine
from deltasam.step.passes import Passes
from deltasam.step.radius import Radius


def mixed_step(passes: Passes, rho: Radius, weight: float) -> Step:
    r"""The gradient :math:`g + \text{weight} \cdot (g_p - g)`, with g at w and :math:`g_p` at :math:`w + \epsilon`.

    Weight 0 is the plain gradient, 1 is SAM's, and more goes past it.

    Cost: 2 forwards, 2 backwards; two copies of the parameters (one is g), and about three more of the largest tensor
    for a moment.

    Args:
        passes: The passes of the step.
        rho: The radius.
        weight: How far to go from g towards :math:`g_p`.
    """
    # The plain gradient is mixed in for everything that is trained, even if only some parameters are perturbed.
    losses, plain = passes.gradient(params=list(passes.involved.values()))
    g = dict(zip(passes.involved, plain, strict=True))
    del plain
    with passes.fresh_grads() as trained:
        with passes.ascend([g[name] for name in passes.params], rho, consume=False) as ascent:
            perturbed = passes.accumulate()
        g = {name: g[name] for name in trained}  # without those of frozen parameters
        with torch.no_grad():
            one = torch.ones_like(ascent.norm)
            # After a skipped ascent g may be infinite, and the gradient in .grad is the plain one.
            beyond = torch.where(ascent.skipped, torch.zeros_like(one), (weight - 1) * one)
            for name, p in trained.items():  # popped one by one, so that no third copy of the gradient is held
                # The difference comes first: large multiples of two close gradients would cancel in half precision.
                plain_grad = g.pop(name)
                difference = added(p.grad, None if plain_grad is None else -plain_grad)
                p.grad = added(p.grad, combine(beyond, difference, one, None))
    return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
