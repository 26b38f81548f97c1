"""Subset SAM: computes the perturbation on a part of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltasam.methods._base import Method
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.step.batches import batch_size, portion
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class SubsetSAM(Method):
    r"""SAM with the perturbation computed on the first :math:`\lceil f N \rceil` instances S of the batch.

    .. math:: \epsilon^* = \rho \, \nabla l_S(w) / \lVert \nabla l_S(w) \rVert_2, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon^*)

    Cost: 1 + f forwards and backwards; one extra copy of the parameters. ``step.losses`` are those of the subset: the
    other instances are never evaluated at w. Random draws and BatchNorm statistics are those of the pass over the
    whole batch.

    Attributes:
        rho: Radius of the perturbation.
        fraction: f: 0.25 as Bahri et al. for language models, 0.2 as Brock et al.

    References:
        Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, ICML 2021;
        Bahri et al., Sharpness-Aware Minimization Improves Language Model Generalization, ACL 2022.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SubsetSAM(fraction=0.25).backward(model, torch.ones(8, 2), objective)
        >>> step.losses.shape, step.perturbed_losses.shape
        (torch.Size([2]), torch.Size([8]))
    """

    rho: Rho = radius()
    fraction: float = number(0.25, high=1, open_low=True)
    cost = "1+f"
    subsets_batch = True

    def _step(self, passes: Passes) -> Step:
        size = batch_size(passes.batches[0])
        if size is None:
            raise ValueError("SubsetSAM needs a batch with tensors whose first dimension is the instances")
        passes.sizes[0] = size
        first = torch.arange(portion(self.fraction, size), device=passes.device)
        losses, grads = passes.subset(first).gradient(keep_side_effects=False)
        with passes.ascend(grads, self.radius) as ascent:
            perturbed = passes.accumulate(keep_side_effects=True)
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)
