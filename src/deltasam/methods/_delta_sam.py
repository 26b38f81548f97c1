"""delta-SAM: one perturbation for the batch, computed from reweighted instances."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.step.passes import Passes
from deltasam.step.radius import Number, Radius, Rho
from deltasam.weighting import FiniteDifference, InstanceWeights, Weighting

PROBE_RADIUS = 0.05  # the paper's rho


@dataclass(frozen=True, kw_only=True)
class DeltaSAM(Method):
    r"""delta-SAM: SAM with dynamic reweighting (Algorithm 1, Eq. 5-7).

    .. math:: \nabla l_B(w) = \nabla \textstyle\sum_i g_i\, l_i(w), \qquad
              \epsilon^* = \rho \, \nabla l_B(w) / \lVert \nabla l_B(w) \rVert_2, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon^*)

    The weights g are larger for instances whose gradient changes faster, so that the one shared perturbation
    approximates a perturbation per instance. Only the ascent is weighted, not the gradient at :math:`w + \epsilon^*`.

    Cost: 4 forwards, 2 backwards with the paper's weights. The probes come first and share :math:`l_i(w)` with the
    gradient pass. Where autocast or TF32 make that pass less precise than the probes, there is a fifth forward.
    Memory: one extra copy of the parameters (two if captured).

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.
        eta: Floor of the denominator of Eq. 5.
        weighting: Where g comes from.
        probe_every: Probe on every k-th step only; the steps in between are SAM.
        seed: Seed of the random directions. Each step draws another direction, the same after a resume.

    References:
        Zhou et al., Sharpness-Aware Minimization with Dynamic Reweighting, Findings of EMNLP 2022.

    Relations:
        With ``Uniform()`` weights it is :class:`SAM`. It approximates :class:`PerInstanceSAM`.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = DeltaSAM(rho=0.05, eta=1e-4).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, step.weights.shape
        (4, 2, torch.Size([4]))
    """

    rho: Rho = radius()
    eta: float = number(1e-4, open_low=True)
    weighting: Weighting = field(default_factory=FiniteDifference)
    probe_every: int = number(1, low=1, whole=True)
    seed: int = random_seed()
    cost = "4/2"

    def __post_init__(self) -> None:
        """Also checks the weighting."""
        super().__post_init__()
        if not isinstance(self.weighting, Weighting):
            raise TypeError(f"weighting={self.weighting!r} must be a Weighting such as FiniteDifference()")

    def _step(self, passes: Passes) -> Step:
        probes = self.capture_key()
        g = (
            self.weighting(passes, rho=probe_radius(self.radius), eta=self.eta, seed=self.step_seed)
            if probes
            else None
        )
        return reweighted_step(passes, g, self.radius)

    def capture_key(self) -> bool:
        """Whether the next step probes."""
        return self.steps % self.probe_every == 0


def probe_radius(rho: Radius) -> Number:
    """The default radius of probes: rho, if that does not depend on the gradient, which comes after them."""
    known = rho.known()
    return PROBE_RADIUS if known is None else known


def reweighted_step(passes: Passes, g: InstanceWeights | None, rho: Radius) -> Step:
    """SAM with instance weights in its ascent; uniform ones for None."""
    losses, grads = passes.gradient(g)
    with passes.ascend(grads, rho) as ascent:
        perturbed = passes.accumulate()
    return make_step(passes, losses, perturbed=perturbed, ascent=ascent, weights=None if g is None else g.values)
