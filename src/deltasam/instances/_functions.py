"""The engine for one batch, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from deltasam.instances._ascent import adversarial, adversarial_by_loop, ascend
from deltasam.instances._errors import UncoveredError
from deltasam.instances._memory import tell_once
from deltasam.passes import ObjectiveLike, Passes
from deltasam.perturb import Selection

Engine = Literal["auto", "low-rank", "loop"]


def instance_gradient_norms(
    model: nn.Module, batch: Any, objective: ObjectiveLike, *, params: Selection = "all", engine: Engine = "auto"
) -> Tensor:
    r""":math:`\lVert \nabla l_i(w) \rVert_2` of every instance, (N,), exactly, from one batched forward and backward.

    No per-instance gradient is written out; tied weights and layers used several times are right. ``.grad``, the
    weights, the random streams and the buffers stay as they were.

    Args:
        model: The model, in the mode it is to be used in.
        batch: Whatever the objective takes.
        objective: ``objective(model, batch) -> (N,)``.
        params: Which parameters count.
        engine: ``"auto"``, ``"low-rank"`` or ``"loop"``.

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> instance_gradient_norms(model, x, lambda model, x: model(x).squeeze(-1)).tolist()
        [5.0, 1.0]
    """
    part = Passes(model, batch, objective, params=params)
    if engine != "loop":
        try:
            return ascend(part, 0.0).norms
        except UncoveredError as why:
            if engine == "low-rank":
                raise
            tell_once(part.inner, f"{why}. The instances go one after the other instead (slow)")
    return adversarial_by_loop(part, 0.0)[1]


def instance_adversarial_losses(
    model: nn.Module,
    batch: Any,
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    steps: int = 1,
    stride: float | None = None,
    group: int = 1,
    params: Selection = "all",
    engine: Engine = "auto",
) -> Tensor:
    r""":math:`l_i(w + \epsilon_i)` of every instance, (N,), for its own adversary :math:`\epsilon_i` (Eq. 2).

    Args:
        model: The model, in the mode it is to be used in.
        batch: Whatever the objective takes.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the perturbation.
        steps: Ascent steps; 1 is the paper's. More give a stronger adversary inside the same ball.
        stride: Length of a step; rho for one, 2 rho / steps for several.
        group: Instances that share a perturbation.
        params: Which parameters are perturbed.
        engine: ``"auto"``, ``"low-rank"`` or ``"loop"``.

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> _ = nn.init.zeros_(model.weight)
        >>> instance_adversarial_losses(model, x, lambda model, x: model(x).squeeze(-1), rho=0.1).tolist()
        [0.5, 0.10000000149011612]
    """
    if steps < 1:
        raise ValueError(f"steps={steps!r} must be a positive whole number")
    part = Passes(model, batch, objective, params=params)
    return adversarial(part, rho, steps=steps, stride=stride, group=group, engine=engine)[2]


@contextmanager
def perturbed_instances(
    model: nn.Module,
    batch: Any,
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    steps: int = 1,
    group: int = 1,
    params: Selection = "all",
) -> Iterator[Tensor]:
    r"""Inside the context the model computes instance i with the weights :math:`w + \epsilon_i`.

    Call it on the same batch only. Autograd gives the gradient of :math:`\frac1N \sum_i l_i(w + \epsilon_i)`; keep the
    context open while it runs if the model uses activation checkpointing.

    Yields:
        The gradient norms at w, (G,).

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1), torch.rand(4, 2)
        >>> objective = lambda model, x: model(x).squeeze(-1) ** 2
        >>> before = objective(model, x)
        >>> with perturbed_instances(model, x, objective, rho=0.1):
        ...     after = objective(model, x)
        >>> bool((after > before).all())
        True
    """
    found = ascend(Passes(model, batch, objective, params=params), rho, steps=steps, group=group)
    with found.perturbed():
        yield found.norms
