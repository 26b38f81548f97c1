"""How well the methods' updates point where the per-instance adversary's does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deltasam.analysis._common import batches_of, cosine, gradient_of, in_mode
from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.passes import ObjectiveLike
from deltasam.weighting import Directional, FiniteDifference, OwnGradient, RandomWeights, Uniform, Weighting

#: The weightings that are compared by default.
WEIGHTINGS: dict[str, Weighting] = {
    "FiniteDifference": FiniteDifference(),
    "Directional": Directional(),
    "OwnGradient": OwnGradient(),
    "Uniform": Uniform(),
    "RandomWeights": RandomWeights(),
}


@dataclass(frozen=True)
class Alignment:
    r"""Cosines for one method, means over the batches.

    Attributes:
        method: Its name.
        regulariser: Cosine of its :math:`d\mathcal R / dw` with :math:`d\mathcal R_\text{inst}/dw`, the paper's
            argument.
        update: Cosine of its whole gradient with that of exact per-instance SAM.
        batches: Number of batches.
    """

    method: str
    regulariser: float
    update: float
    batches: int


def alignment(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    eta: float = 1e-4,
    methods: Mapping[str, Method] | None = None,
    training: bool = False,
    limit: int | None = None,
    progress: bool | None = None,
) -> list[Alignment]:
    r"""Compares the gradients of SAM and delta-SAM, with each weighting, with the exact per-instance one.

    With :math:`\frac{d\mathcal R}{dw} = \text{gradient} - \nabla l(w)`, eq. of section 3.1,

    .. math:: \cos\!\left(\frac{d\mathcal R}{dw}, \frac{d\mathcal R_\text{inst}}{dw}\right), \qquad
              \frac{d\mathcal R_\text{inst}}{dw} = \tfrac1N \textstyle\sum_i
              (\nabla l_i(w + \epsilon_i) - \nabla l_i(w)).

    Args:
        model: The model.
        data: Batches.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the methods that are compared by default.
        eta: Floor of Eq. 5 for those.
        methods: The methods to compare; SAM and delta-SAM with every weighting by default.
        training: Compare in train mode; all methods then see the same dropout masks.
        limit: At most so many batches.
        progress: Show a progress bar; by default on a terminal.

    Returns:
        One row per method, the exact one first.

    Example:
        >>> model, data = nn.Linear(2, 1), [torch.rand(4, 2)]
        >>> rows = alignment(model, data, lambda model, x: model(x).squeeze(-1) ** 2, limit=1)
        >>> rows[0].method, round(rows[0].regulariser, 6)
        ('PerInstanceSAM', 1.0)
    """
    if methods is None:
        weighted = {f"DeltaSAM {name}": DeltaSAM(rho=rho, eta=eta, weighting=w) for name, w in WEIGHTINGS.items()}
        methods = {"SAM": SAM(rho=rho), **weighted}
    named: dict[str, Method] = {"PerInstanceSAM": PerInstanceSAM(rho=rho), **methods}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    with in_mode(model, training):
        for batch in batches_of(model, data, limit, progress, "alignment"):
            plain = gradient_of(ERM(), model, batch, objective)
            exact = gradient_of(named["PerInstanceSAM"], model, batch, objective)
            for name, method in named.items():
                # A fresh state, so that stateful methods start alike and random directions are the same for all.
                own = exact if name == "PerInstanceSAM" else gradient_of(replace(method), model, batch, objective)
                rows[name].append(torch.stack([cosine(own - plain, exact - plain), cosine(own, exact)]).cpu())
    means = {name: torch.stack(values).double().mean(0) for name, values in rows.items()}
    return [Alignment(name, float(mean[0]), float(mean[1]), len(rows[name])) for name, mean in means.items()]
