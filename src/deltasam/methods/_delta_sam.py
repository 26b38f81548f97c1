"""delta-SAM: the perturbation follows a reweighted batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from deltasam.methods._base import Method, Step, check_number, make_step
from deltasam.step.passes import Passes
from deltasam.weighting import FiniteDifference, Weighting
from deltasam.weighting._base import usable


@dataclass(frozen=True, kw_only=True)
class DeltaSAM(Method):
    r"""SAM with dynamic reweighting, Algorithm 1, Eq. 5-7.

    .. math:: \nabla l_B(w) = \nabla \textstyle\sum_i g_i\, l_i(w), \qquad
              \epsilon^* = \rho \, \nabla l_B(w) / \lVert \nabla l_B(w) \rVert_2, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon^*)

    The weights g up-weight the instances whose gradient changes fastest, so that the one shared perturbation stands in
    for a perturbation per instance. Only the ascent is weighted; the gradient at :math:`w + \epsilon^*` is not.

    Cost: 4 forwards, 2 backwards with the paper's weights (the probes come first, so that :math:`l_i(w)` is shared
    with the gradient pass: two extra forwards, not three; where autocast or TF32 make that pass less precise than
    the probes, a fifth forward is theirs); one extra copy of the parameters (two, captured).

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.
        eta: Floor of the denominator of Eq. 5.
        weighting: Where g comes from.
        probe_every: Probe on every k-th step only; the steps between use uniform weights, i.e. are SAM's.
        seed: Seed of the random directions. Each step has a direction of its own, the same after a resume.

    References:
        Zhou et al., Sharpness-Aware Minimization with Dynamic Reweighting, Findings of EMNLP 2022.

    Relations:
        With ``Uniform()`` weights it is :class:`SAM`. What it approximates is :class:`PerInstanceSAM`.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = DeltaSAM(rho=0.05, eta=1e-4).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, step.weights.shape
        (4, 2, torch.Size([4]))
    """

    rho: float = 0.05
    eta: float = 1e-4
    weighting: Weighting = field(default_factory=FiniteDifference)
    probe_every: int = 1
    seed: int = 0
    cost = "4/2"
    state_keys = frozenset()

    def __post_init__(self) -> None:
        """Checks the hyperparameters."""
        super().__post_init__()
        check_number("rho", self.rho, 0)
        check_number("eta", self.eta, 0, open_low=True)
        check_number("probe_every", self.probe_every, 1, whole=True)
        check_number("seed", self.seed, -math.inf, whole=True)
        if not isinstance(self.weighting, Weighting):
            raise TypeError(f"weighting={self.weighting!r} must be a Weighting such as FiniteDifference()")

    def _step(self, passes: Passes) -> Step:
        if not self.capture_key():
            weights, (losses, grads) = None, passes.gradient()
        else:
            weights, losses, grads = self._weighted_gradient(passes)
        with passes.ascend(grads, self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent, weights=weights)

    def capture_key(self) -> bool:
        """Whether the next step probes."""
        return self.steps % self.probe_every == 0

    def _weighted_gradient(self, passes: Passes) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        weigh = self.weighting.probe(passes, rho=self.rho, eta=self.eta, seed=self.step_seed)
        found: list[Tensor] = []

        def normalised(losses: Tensor) -> Tensor:
            g = weigh(losses)
            mean = passes.ranks.mean(g.mean()) if self.scope == "global" else g.mean()
            found.append(usable(g, mean))
            return found[0] / usable(mean, mean)  # of mean 1: in half precision the gradient keeps its magnitude

        if len(passes.batches) == 1:
            losses, grads = passes.gradient(normalised)
        else:  # the weights of all instances must be known before the first micro-batch is weighted
            losses, grads = passes.gradient(normalised(passes.losses()))
        return found[0], losses, grads
