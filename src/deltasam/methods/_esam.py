"""Efficient SAM: perturbs a random subset of the tensors, trains on the instances whose losses rise most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.step.batches import portion
from deltasam.step.branches import is_recorded
from deltasam.step.norms import dense, global_norm, masked_product
from deltasam.step.passes import Passes
from deltasam.step.radius import LossBudget, LossShare, Radius, Rho
from deltasam.step.randomness import Seed, drawn_on_the_host


@dataclass(frozen=True, kw_only=True)
class ESAM(Method):
    r"""ESAM, both parts: stochastic weight perturbation and sharpness-sensitive data selection.

    1. Every tensor is perturbed with probability beta, by :math:`\epsilon = \rho\, g / (\beta \lVert g \rVert)`.
    2. The :math:`\lceil \gamma N \rceil` instances with the largest :math:`l_i(w + \epsilon) - l_i(w)` are kept; the
       gradient is that of their mean loss at :math:`w + \epsilon`.

    Cost: 3 forwards (one without a graph, one over the kept instances only), 2 backwards (the first with respect to
    some parameters, or to all if captured, the second over the kept instances); 2 and 2 with gamma = 1. Memory: one
    extra copy of the perturbed parameters. The kept instances form a batch of another shape, so they draw other
    dropout masks. If the perturbation is skipped, all instances are kept on the CPU, but not on a GPU, where this
    would synchronise.

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

    def supports_micro_batches(self) -> bool:
        """Whether it selects no instances."""
        return self.gamma == 1 or self.is_erm()

    def _step(self, passes: Passes) -> Step:
        params = [*passes.params.values()]
        if is_recorded(passes.device) and self.beta < 1:
            losses, direction = passes.gradient()
            norm = self._select(passes, direction)
        else:
            if self.beta < 1:
                params = [p for p, used in zip(params, self._draw(len(params)), strict=True) if used]
            losses, direction = passes.gradient(params=params)
            norm = global_norm([g for g in direction if g is not None])
        with passes.ascend(direction, self.radius / self.beta, norm=norm, params=params) as ascent:
            if self.gamma == 1:
                perturbed = passes.accumulate()
            else:
                perturbed = passes.losses()
                kept = torch.topk(perturbed - losses, portion(self.gamma, losses.shape[0])).indices.sort().values
                # Reading the flag would synchronise with a GPU.
                is_readable = ascent.skipped.device.type == "cpu" and not is_recorded(passes.device)
                is_skipped = is_readable and bool(ascent.skipped)
                (passes if is_skipped else passes.subset(kept)).accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    def _select(self, passes: Passes, direction: list[Tensor | None]) -> Tensor:
        """Sets the gradients of all tensors but those of this step to zero, and returns the norm of the others.

        The choice is an input of a recorded step: the same operations run whatever it is. So the first backward is
        with respect to all tensors.
        """
        if not _is_of_the_whole(self.radius):
            raise RuntimeError(
                "the radius depends on which tensors are perturbed, and a recording contains all of them"
            )
        used = drawn_on_the_host(passes.device, partial(self._mask, len(direction)), self.step_seed.step)
        factors = used.unbind(0)
        for k, g in enumerate(direction):
            if g is not None:
                direction[k] = masked_product(dense(g), factors[k].to(g.device, g.dtype))
        return global_norm([g for g in direction if g is not None])

    def _draw(self, tensors: int) -> list[bool]:
        """Which tensors are perturbed in this step; at least one is."""
        chosen: list[bool] = self._mask(tensors, self.step_seed.step).tolist()
        return chosen

    def _mask(self, tensors: int, step: int) -> Tensor:
        """The same for any step, as a tensor on the host."""
        generator = torch.Generator().manual_seed(Seed(self.seed, step).value)
        draws = torch.rand(tensors, generator=generator, device="cpu")
        chosen = draws < self.beta
        chosen[draws.argmin()] |= ~chosen.any()
        return chosen


def _is_of_the_whole(rule: Radius) -> bool:
    """Whether the radius is one number that depends on the gradient and the loss alone, not on the weights."""
    if isinstance(rule, (LossBudget, LossShare)):
        return not isinstance(rule.at_most, Radius) or _is_of_the_whole(rule.at_most)
    return rule.known() is not None
