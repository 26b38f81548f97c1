"""How much the worst perturbation raises the loss: the adversarial risk of the paper's Table 4, R_batch and R_inst."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.analysis._common import batches_of, in_mode
from deltasam.methods import check_number
from deltasam.per_instance import adversarial
from deltasam.step.passes import ObjectiveLike, Passes
from deltasam.step.selection import Selection


@dataclass(frozen=True)
class Risk:
    """Adversarial risk; ``float(risk)`` is its value.

    Attributes:
        value: L_adv.
        clean: The mean loss at w.
        losses: Losses at w, (instances,).
        adversarial_losses: Loss of each instance at its w + eps_i, (instances,).
        norms: Gradient norms at w, one per group.
    """

    value: float
    clean: float
    losses: Tensor
    adversarial_losses: Tensor
    norms: Tensor

    def __float__(self) -> float:
        return self.value


def adversarial_risk(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    steps: int = 1,
    group: int = 1,
    params: Selection = "trained",
    engine: str = "auto",
    training: bool = False,
    limit: int | None = None,
    progress: bool | None = None,
) -> Risk:
    r"""Returns the mean loss with a worst-case perturbation per instance, section 5 of the paper.

    .. math:: \mathcal L_\text{adv} = \frac1N \sum_i \max_{\lVert \epsilon_i \rVert_2 \le \rho} l_i(w + \epsilon_i)

    The maximum is approximated by ``steps`` ascent steps; the paper uses 1. Exact per instance, at the cost of two or
    three forwards and one backward per batch, not per instance.

    Args:
        model: The model.
        data: Batches.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius; the paper uses 0.05 for all methods.
        steps: Ascent steps inside the ball.
        group: Instances that share a perturbation.
        params: Which parameters are perturbed.
        engine: ``"auto"``, ``"low-rank"`` or ``"loop"``.
        training: Measure in train mode, with the same dropout masks at w and at w + eps.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Example:
        >>> model, data = nn.Linear(2, 1), [torch.rand(3, 2), torch.rand(2, 2)]
        >>> risk = adversarial_risk(model, data, lambda model, x: model(x).squeeze(-1) ** 2, rho=0.1)
        >>> float(risk) > risk.clean, risk.losses.shape
        (True, torch.Size([5]))
    """
    check_number("rho", rho, 0)
    check_number("steps", steps, 1, whole=True)
    clean, found, norms = [], [], []
    with in_mode(model, training):
        for batch in batches_of(model, data, limit, progress, "adversarial risk"):
            passes = Passes(model, batch, objective, params=params)
            losses, own, worst = adversarial(passes, rho, steps=steps, group=group, engine=engine)
            clean.append(losses.double().cpu())
            found.append(worst.double().cpu())
            norms.append(own.double().cpu())
    at_w, at_worst = torch.cat(clean), torch.cat(found)
    return Risk(float(at_worst.mean()), float(at_w.mean()), at_w, at_worst, torch.cat(norms))


@dataclass(frozen=True)
class Sharpness:
    """Sharpness with one perturbation per batch and one per instance, means over the batches.

    Attributes:
        batch: R_batch.
        instance: R_inst.
        first_order: rho times the mean gradient norm of the instances: R_inst to first order.
        ordered: Fraction of the batches with R_inst >= R_batch, which the definitions imply. Ascent steps only
            approximate the two maxima, so it can be below 1 if the losses are far from linear within rho.
    """

    batch: float
    instance: float
    first_order: float
    ordered: float


def sharpness(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    steps: int = 1,
    params: Selection = "trained",
    training: bool = False,
    limit: int | None = None,
    progress: bool | None = None,
) -> Sharpness:
    r"""Returns the two sharpness measures of section 3.1.

    .. math:: \mathcal R_\text{batch} = \max_\epsilon \tfrac1N \sum_i \left(l_i(w+\epsilon) - l_i(w)\right) \le
              \mathcal R_\text{inst} = \tfrac1N \sum_i \max_{\epsilon_i} \left(l_i(w+\epsilon_i) - l_i(w)\right)

    Args:
        model: The model.
        data: Batches; R_batch depends on their size.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius.
        steps: Ascent steps inside the ball.
        params: Which parameters are perturbed.
        training: Measure in train mode.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Example:
        >>> model, data = nn.Linear(2, 1), [torch.rand(4, 2)]
        >>> found = sharpness(model, data, lambda model, x: model(x).squeeze(-1) ** 2, rho=0.01)
        >>> found.instance >= found.batch, found.ordered
        (True, 1.0)
    """
    check_number("rho", rho, 0)
    check_number("steps", steps, 1, whole=True)
    rows = []
    with in_mode(model, training):
        for batch in batches_of(model, data, limit, progress, "sharpness"):
            passes = Passes(model, batch, objective, params=params)
            losses, norms, worst = adversarial(passes, rho, steps=steps)
            _, _, shared = adversarial(passes, rho, steps=steps, group=losses.shape[0])
            rises = [(shared - losses).mean(), (worst - losses).mean(), rho * norms.mean()]
            rows.append(torch.stack([rise.double().cpu() for rise in rises]))
    table = torch.stack(rows)
    batch_rise, instance_rise, slope = table.mean(0).tolist()
    return Sharpness(batch_rise, instance_rise, slope, float((table[:, 1] >= table[:, 0]).double().mean()))
