"""The public functions: gradient norms, adversarial losses and perturbed instances of one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from torch import Tensor, nn

from deltasam.per_instance.ascent import Engine, adversarial, ascend, gradient_norms
from deltasam.step.batches import MicroBatches
from deltasam.step.checks import check_number, check_step
from deltasam.step.passes import ObjectiveLike, Passes
from deltasam.step.selection import Selection


def instance_gradient_norms(
    model: nn.Module, batch: Any, objective: ObjectiveLike, *, params: Selection = "trained", engine: Engine = "auto"
) -> Tensor:
    r""":math:`\lVert \nabla l_i(w) \rVert_2` of every instance, (N,), exactly, from one batched forward and backward.

    No per-instance gradient is written out. Tied weights and layers that are used several times are handled exactly.
    ``.grad``, the weights, the random streams and the buffers stay as they were.

    Args:
        model: The model, in the mode (train or eval) to use.
        batch: A batch that the objective accepts.
        objective: ``objective(model, batch) -> (N,)``.
        params: Which parameters to differentiate by.
        engine: ``"low-rank"``; ``"loop"``: one instance after the other, for any model, slow; ``"auto"``: the
            low-rank engine if it covers the model.

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> instance_gradient_norms(model, x, lambda model, x: model(x).squeeze(-1)).tolist()
        [5.0, 1.0]
    """
    return gradient_norms(_one_batch(model, batch, objective, params, engine), engine=engine)


def instance_adversarial_losses(
    model: nn.Module,
    batch: Any,
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    steps: int = 1,
    stride: float | None = None,
    group: int = 1,
    params: Selection = "trained",
    engine: Engine = "auto",
) -> Tensor:
    r""":math:`l_i(w + \epsilon_i)` of every instance, (N,), each with its own adversary :math:`\epsilon_i` (Eq. 2).

    Args:
        model: The model, in the mode (train or eval) to use.
        batch: A batch that the objective accepts.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the perturbation.
        steps: Ascent steps; the paper takes 1. More steps give a stronger adversary inside the same ball.
        stride: Length of a step; rho for one, 2 rho / steps for several.
        group: Instances that share a perturbation.
        params: Which parameters are perturbed.
        engine: ``"low-rank"``; ``"loop"``: one instance after the other, for any model, slow; ``"auto"``: the
            low-rank engine if it covers the model.

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> _ = nn.init.zeros_(model.weight)
        >>> instance_adversarial_losses(model, x, lambda model, x: model(x).squeeze(-1), rho=0.1).tolist()
        [0.5, 0.10000000149011612]
    """
    _check_ascent(rho, steps, stride, group)
    part = _one_batch(model, batch, objective, params, engine)
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
    params: Selection = "trained",
) -> Iterator[Tensor]:
    r"""Inside the context the model computes instance i with the weights :math:`w + \epsilon_i`.

    Call the model on the same batch only. Autograd gives the gradient of :math:`\frac1N \sum_i l_i(w + \epsilon_i)`.
    With activation checkpointing, keep the context open during ``backward``.

    Args:
        model: The model, in the mode (train or eval) to use.
        batch: A batch that the objective accepts.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the perturbation.
        steps: Ascent steps.
        group: Instances that share a perturbation.
        params: Which parameters are perturbed.

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
    _check_ascent(rho, steps, None, group)
    found = ascend(_one_batch(model, batch, objective, params), rho, steps=steps, group=group)
    with found.perturbed():
        yield found.norms


def _one_batch(
    model: nn.Module, batch: Any, objective: ObjectiveLike, params: Selection, engine: Engine = "low-rank"
) -> Passes:
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r} must be one of {list(get_args(Engine))}")
    check_step(model, objective)
    if isinstance(batch, MicroBatches):
        raise ValueError(f"batch is MicroBatches of {len(batch)}: call the function once for each of them")
    return Passes(model, batch, objective, params=params)


def _check_ascent(rho: float, steps: int, stride: float | None, group: int) -> None:
    check_number("rho", rho, 0)
    check_number("steps", steps, 1, whole=True)
    check_number("group", group, 1, whole=True)
    if stride is not None:
        check_number("stride", stride, 0)
