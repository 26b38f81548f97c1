"""Cosines between the gradients of methods and the exact per-instance gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.analysis._common import bar, batches_of, cosine, gradient_of, in_mode, means
from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM, check_number
from deltasam.step.float32 import full_float32
from deltasam.step.passes import ObjectiveLike
from deltasam.weighting import (
    Directional,
    FiniteDifference,
    LossWeights,
    OwnGradient,
    RandomWeights,
    Uniform,
    Weighting,
)

_ALL = (FiniteDifference(), Directional(), OwnGradient(), Uniform(), LossWeights(), RandomWeights())
#: The weightings, by name.
WEIGHTINGS: dict[str, Weighting] = {type(weighting).__name__: weighting for weighting in _ALL}
CONTROLS = ("Uniform", "LossWeights", "RandomWeights")


@dataclass(frozen=True)
class Alignment:
    r"""Cosines of one method, means over the batches.

    Attributes:
        method: Name of the method.
        regulariser: Cosine of its :math:`d\mathcal R / dw` with :math:`d\mathcal R_\text{inst}/dw`, the paper's
            argument.
        update: Cosine of its whole gradient with that of exact per-instance SAM.
        batches: Number of batches.
        by_batch: The two cosines of every batch, to estimate the error of the means.
    """

    method: str
    regulariser: float
    update: float
    batches: int
    by_batch: dict[str, tuple[float, ...]]


def alignment(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    eta: float = 1e-4,
    weightings: Mapping[str, Weighting] | None = None,
    methods: Mapping[str, Method] | None = None,
    training: bool = False,
    limit: int | None = None,
    progress: bool | None = None,
) -> list[Alignment]:
    r"""Compares the gradients of SAM and of delta-SAM with each weighting to the exact per-instance gradient.

    With :math:`\frac{d\mathcal R}{dw} = \text{gradient} - \nabla l(w)`, eq. of section 3.1,

    .. math:: \cos\!\left(\frac{d\mathcal R}{dw}, \frac{d\mathcal R_\text{inst}}{dw}\right), \qquad
              \frac{d\mathcal R_\text{inst}}{dw} = \tfrac1N \textstyle\sum_i
              (\nabla l_i(w + \epsilon_i) - \nabla l_i(w)).

    TF32 is disabled, because the regularisers are small differences of gradients.

    Cost per batch: one step of plain training, of exact per-instance SAM and of every method.

    Args:
        model: The model.
        data: Batches.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the exact perturbation and of the default methods.
        eta: Floor of Eq. 5 for the default methods.
        weightings: Weightings of delta-SAM, by name; by default all except ``Uniform``, which is SAM.
        methods: The methods to compare, by name; by default SAM and delta-SAM with these weightings.
        training: Compare in train mode; all methods then see the same dropout masks.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Returns:
        One row per method; the exact one is first.

    Example:
        >>> import torch
        >>> model, data = nn.Linear(2, 1), [torch.rand(4, 2)]
        >>> rows = alignment(model, data, lambda model, x: model(x).squeeze(-1) ** 2, limit=1)
        >>> rows[0].method, round(rows[0].regulariser, 6)
        ('PerInstanceSAM', 1.0)
    """
    check_number("rho", rho, 0, open_low=True)  # at 0 the regulariser has no direction
    if methods is None:
        chosen = weightings or {name: w for name, w in WEIGHTINGS.items() if name != "Uniform"}
        weighted = {f"DeltaSAM {name}": DeltaSAM(rho=rho, eta=eta, weighting=w) for name, w in chosen.items()}
        methods = {"SAM": SAM(rho=rho), **weighted}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("PerInstanceSAM", *methods)}
    progress_bar = bar(data, limit, len(methods) + 2, progress, "alignment")
    with in_mode(model, training), full_float32(next(model.parameters()).device), progress_bar as begin:
        for number, batch in enumerate(batches_of(model, data, limit, False, "")):
            begin("ERM")
            plain = gradient_of(ERM(), model, batch, objective)
            begin("PerInstanceSAM")
            exact = gradient_of(PerInstanceSAM(rho=rho), model, batch, objective)
            found["PerInstanceSAM"].append(_cosines(exact, exact, plain))
            for name, method in methods.items():
                begin(name)
                own = gradient_of(_fresh(method, number), model, batch, objective)
                found[name].append(_cosines(own, exact, plain))
    columns = ("regulariser", "update")
    return [Alignment(name, batches=len(rows), **means(columns, rows)) for name, rows in found.items()]


def _fresh(method: Method, number: int) -> Method:
    """Copies a method without its state; the random direction depends on the batch, not on the weighting."""
    seed = {"seed": method.seed + number} if hasattr(method, "weighting") and hasattr(method, "seed") else {}
    return method.replace(state={}, **seed)


def _cosines(own: Tensor, exact: Tensor, plain: Tensor) -> tuple[float, float]:
    return float(cosine(own - plain, exact - plain)), float(cosine(own, exact))
