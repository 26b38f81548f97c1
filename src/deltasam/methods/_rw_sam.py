"""RW-SAM: instances with large gradients weigh more in the ascent."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._delta_sam import probe_radius, reweighted_step
from deltasam.methods._fields import choice, number, radius, random_seed
from deltasam.methods._step import Step
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho
from deltasam.weighting import Norms, NormWeights


@dataclass(frozen=True, kw_only=True)
class RWSAM(Method):
    r"""RW-SAM: SAM whose ascent weights the instances by a softmax of their gradient norms.

    .. math:: g_i \propto \exp\Bigl(\lambda\, \frac{n_i}{\frac1N \sum_j n_j}\Bigr), \quad
              n_i = \lVert \nabla l_i(w) \rVert_2, \qquad
              d = \nabla \textstyle\sum_i g_i\, l_i(w), \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \rho\, d / \lVert d \rVert_2)

    In the paper's analysis the gain from small micro-batches (m-sharpness) comes from the variance of the gradients in
    the ascent. Weights that grow with the norm of a gradient give one perturbation of the whole batch a similar
    effect. Only the ascent is weighted.

    The paper has :math:`\exp(\lambda n_i)` and norms from finite differences. We had its summary, neither its
    appendix nor its code, so we do not know how it scales the norms. Here they are divided by their mean over the
    batch: :math:`\lambda` then has no unit, and values from the paper may not carry over.

    Cost: 3 forwards, 2 backwards with one random direction; one extra copy of the parameters (two if captured). Exact
    norms: 3 forwards, 3 backwards, one of them without weight gradients, and the memory of
    :class:`PerInstanceSAM` before the ascent.

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.
        lam: :math:`\lambda`, how much more large gradients weigh; 0 is SAM.
        norms: ``"finite-difference"``: estimated along random directions, for any model; ``"exact"``: from the
            per-instance engine.
        samples: Number of random directions; one more costs one more forward.
        seed: Seed of the random directions. Each step draws others, the same after a resume.

    References:
        Luo et al., Unveiling m-Sharpness Through the Structure of Stochastic Gradient Noise, NeurIPS 2025
        (arXiv:2509.18001).

    Relations:
        It is :class:`DeltaSAM` with :class:`~deltasam.weighting.NormWeights`, which has the details of the norms.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = RWSAM(rho=0.05, lam=1.0).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, step.weights.shape
        (3, 2, torch.Size([4]))
    """

    rho: Rho = radius()
    lam: float = number(1.0)
    norms: Norms = choice("finite-difference", Norms)
    samples: int = number(1, low=1, whole=True)
    seed: int = random_seed()
    cost = "3/2"

    def _step(self, passes: Passes) -> Step:
        weighting = NormWeights(lam=self.lam, norms=self.norms, samples=self.samples)
        # eta is the floor of a denominator that these weights do not have.
        g = weighting(passes, rho=probe_radius(self.radius), eta=1.0, seed=self.step_seed)
        return reweighted_step(passes, g, self.radius)
