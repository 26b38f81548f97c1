"""Efficient SAM: perturbs a random subset of the tensors, trains on the instances whose losses rise most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.step.batches import portion
from deltasam.step.norms import global_norm
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho
from deltasam.step.randomness import Seed


@dataclass(frozen=True, kw_only=True)
class ESAM(Method):
    r"""ESAM, both parts: stochastic weight perturbation and sharpness-sensitive data selection.

    1. Every tensor is perturbed with probability beta, by :math:`\epsilon = \rho\, g / (\beta \lVert g \rVert)`.
    2. The :math:`\lceil \gamma N \rceil` instances with the largest :math:`l_i(w + \epsilon) - l_i(w)` are kept; the
       gradient is that of their mean loss at :math:`w + \epsilon`.

    Cost: 3 forwards (one without a graph, one over the kept instances only), 2 backwards (the first with respect to
    some parameters, the second over the kept instances); 2 and 2 with gamma = 1. Memory: one extra copy of the
    perturbed parameters. The kept instances form a batch of another shape, so they draw other dropout masks. If the
    perturbation is skipped, all instances are kept on the CPU, but not on a GPU, where this would synchronise.

    Attributes:
        rho: Radius; 0 is plain training (on all instances).
        beta: Probability that a tensor is perturbed.
        gamma: Share of the instances that are trained on.
        seed: Seed of the choice of tensors, a new choice every step.

    References:
        Du et al., Efficient Sharpness-aware Minimization for Improved Training of Neural Networks, ICLR 2022.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = ESAM(beta=1.0, gamma=0.5).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, step.perturbed_losses.shape
        (3, 2, torch.Size([4]))
    """

    rho: Rho = radius()
    beta: float = number(0.6, high=1, open_low=True)
    gamma: float = number(0.5, high=1, open_low=True)
    seed: int = random_seed()
    cost = "3/2"
    subsets_batch = True
    capturable = False

    def supports_micro_batches(self) -> bool:
        """Whether it selects no instances."""
        return self.gamma == 1 or self.is_erm()

    def _step(self, passes: Passes) -> Step:
        moving = [p for p, used in zip(passes.params.values(), self._draw(len(passes.params)), strict=True) if used]
        losses, grads = passes.gradient(params=moving)
        norm = global_norm([g for g in grads if g is not None])
        with passes.ascend(grads, self.radius / self.beta, norm=norm, params=moving) as ascent:
            if self.gamma == 1:
                perturbed = passes.accumulate()
            else:
                perturbed = passes.losses()
                kept = torch.topk(perturbed - losses, portion(self.gamma, losses.shape[0])).indices.sort().values
                # Reading the flag would synchronise with a GPU.
                is_skipped = ascent.skipped.device.type == "cpu" and bool(ascent.skipped)
                (passes if is_skipped else passes.subset(kept)).accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    def _draw(self, tensors: int) -> list[bool]:
        """Which tensors are perturbed in this step; at least one is."""
        generator = torch.Generator().manual_seed(Seed(self.seed, self.steps).value)
        draws = torch.rand(tensors, generator=generator, device="cpu")
        chosen: list[bool] = (draws < self.beta).tolist()
        if not any(chosen):
            chosen[int(draws.argmin())] = True
        return chosen
