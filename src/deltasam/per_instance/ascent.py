"""From the gradients of the instances to their adversaries, by the low-rank engine or by a loop over the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.compiling.region import warn_about_wrapper
from deltasam.per_instance.cut_out import CutOut
from deltasam.per_instance.errors import UncoveredError
from deltasam.per_instance.interception.memory import memory_of, warn_once
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.recording import perturbed, record
from deltasam.step.branches import is_recorded
from deltasam.step.checks import check_losses, require_apart
from deltasam.step.draws import use_of
from deltasam.step.model_buffers import ModelBuffers
from deltasam.step.moving import perturbed as moved
from deltasam.step.norms import global_norm, step_size
from deltasam.step.passes import Passes
from deltasam.step.radius import Number
from deltasam.step.randomness import RandomState, accelerators, generators_of

Engine = Literal["auto", "low-rank", "loop"]


@dataclass(frozen=True, eq=False)
class Ascent:
    r"""The adversaries of a batch.

    Attributes:
        slots: Where the parameters of the model are.
        losses: :math:`l_i(w)`, (N,).
        norms: :math:`\lVert \nabla l_g(w) \rVert`, (G,).
        terms: :math:`\epsilon_g = \sum_k c_{kg} \nabla_k l_g`: gradients with their coefficients (G,).
    """

    slots: ParameterSlots
    losses: Tensor
    norms: Tensor
    terms: list[tuple[InstanceGradients, Tensor]]

    def perturbed(self, sign: float = 1.0) -> AbstractContextManager[None]:
        """The model at w + sign * eps_g."""
        terms = [(gradients, sign * c) for gradients, c in self.terms]
        return perturbed(self.slots, terms)


def ascend(part: Passes, rho: Number, *, steps: int = 1, stride: float | None = None, group: int = 1) -> Ascent:
    r"""The adversaries of one batch in low rank; random streams and buffers stay as they were.

    .. math:: \epsilon \leftarrow \Pi_\rho\!\left(\epsilon + \alpha \,
              \nabla l_i(w + \epsilon) / \lVert \nabla l_i(w + \epsilon) \rVert\right)

    The norm of :math:`\epsilon` for the projection comes from inner products of the recorded gradients; no tensor of
    the size of the parameters is needed. Cost: a forward and a backward without weight gradients per step.

    Args:
        part: The passes of one batch.
        rho: Radius of the ball.
        steps: Number of ascent steps.
        stride: alpha; rho for one step, 2 rho / steps for several.
        group: Instances that share a perturbation.
    """
    alpha = stride if stride is not None else rho if steps == 1 else 2 * rho / steps

    first = None
    terms: list[tuple[InstanceGradients, Tensor]] = []
    products: dict[tuple[int, int], Tensor] = {}
    for k in range(steps):
        with part.extra(), count_pass(part):
            run = _repeatable(part)
            found = record(part.inner, run, part.params, group=group, terms=terms, objective=part.objective)
        first = first or found
        terms.append((found.gradients, step_size(alpha, found.norms)))
        for j, (gradients, _) in enumerate(terms):
            products[j, k] = products[k, j] = gradients.dot(found.gradients)
        pairs = [(i, j) for i in range(len(terms)) for j in range(len(terms))]
        square = torch.stack([terms[i][1] * terms[j][1] * products[i, j] for i, j in pairs]).sum(0)
        shrink = (rho / square.sqrt()).clamp_max(1).nan_to_num(1.0)
        terms = [(gradients, c * shrink) for gradients, c in terms]
    assert first is not None
    return Ascent(first.slots, first.losses, first.norms, terms)


@contextmanager
def count_pass(part: Passes) -> Iterator[None]:
    """Counts a forward and a backward of the step, unless the model is not covered: the loop counts its own passes."""
    part.count.forwards += 1
    part.count.backwards += 1
    warn_about_wrapper(part.model, part.inner)
    try:
        yield
    except UncoveredError:
        part.count.forwards -= 1
        part.count.backwards -= 1
        raise


def _repeatable(part: Passes) -> Callable[[], Tensor]:
    """A pass that can be repeated with the same random draws and buffers."""
    once = is_recorded(part.device)  # in a CUDA graph nothing can be rewound
    start = None if once else RandomState.now(accelerators(part.params.values()), generators_of(part.inner))

    def run() -> Tensor:
        if start is not None:
            start.restore(use_of(part.inner).streams())
        with nullcontext() if once else ModelBuffers(part.inner).rewound():
            losses = part.evaluate()
        check_losses(losses, graph=True)
        return losses

    return run


def try_ascend(part: Passes, rho: Number, *, engine: str = "auto", **options: Any) -> Ascent | None:
    """As :func:`ascend`; None for the loop engine, and, with a warning, if the low-rank engine fails."""
    if engine == "loop":
        return None
    try:
        return ascend(part, rho, **options)
    except UncoveredError as why:
        if engine == "low-rank":
            raise
        warn_of_loop(part, why)
        return None


def warn_of_loop(part: Passes, why: UncoveredError) -> None:
    """Warns once per model that the low-rank engine does not cover it."""
    warn_once(part.inner, f"{why}. The instances are perturbed one after the other instead (slow)")


def adversarial(part: Passes, rho: Number, *, engine: str = "auto", **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Losses at w (N,), norms (G,) and adversarial losses (N,) of one batch; options as for :func:`ascend`."""
    found = try_ascend(part, rho, engine=engine, **options)
    if found is None:
        losses, norms, (worst,) = by_loop(part, rho, **options)
        return losses, norms, worst
    with found.perturbed():
        return found.losses, found.norms, part.losses()


def gradient_norms(part: Passes, *, engine: str = "auto") -> Tensor:
    """Norms of the gradients of the instances of one batch, (N,), in low rank if the model is covered."""
    found = try_ascend(part, 0.0, engine=engine)
    return by_loop(part, 0.0, signs=())[1] if found is None else found.norms


def both_sides(part: Passes, rho: Number) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses at w, norms, and losses at w + eps_i and w - eps_i of one batch, in low rank if the model is covered."""
    found = try_ascend(part, rho)
    if found is None:
        losses, norms, (plus, minus) = by_loop(part, rho, signs=(1.0, -1.0))
        return losses, norms, plus, minus
    with found.perturbed():
        plus = part.losses()
    with found.perturbed(-1.0):
        minus = part.losses()
    return found.losses, found.norms, plus, minus


def one_by_one(part: Passes, group: int, *, keep_side_effects: bool = False) -> tuple[Tensor, list[Passes]]:
    """For the loop engine: losses at w (N,), and the passes over each group.

    The objectives of this package allow cutting a group out of its batch. Cut out, it would get the dropout masks of
    the first rows instead of its own, so where the pass at w draws random numbers the whole batch passes every time;
    also if the model moves rows, since those of a tensor of the batch need not be the instances then.
    """
    losses, has_draws = part.losses_and_draws(keep_side_effects=keep_side_effects)
    groups = torch.split(torch.arange(losses.shape[0], device=losses.device), group)
    alone = getattr(part.objective, "separable", False) and not memory_of(part.inner).mixes_rows
    if alone and has_draws and len(groups) > 1:
        warn_once(
            part.inner,
            "The model or the objective draws random numbers (dropout), so the loop over instances passes the whole "
            "batch through the model for each of them: cut out, they would get other draws. It is faster in eval mode "
            "or with dropout 0",
        )
    return losses, [_passes_of(part, members, losses, alone=alone and not has_draws) for members in groups]


def _passes_of(part: Passes, members: Tensor, losses: Tensor, *, alone: bool) -> Passes:
    own = part.instances(members, alone=alone)
    # Passes with draws of their own have other losses in any case; a recorded step cannot read them.
    if own.batches is not part.batches and part.randomness == "shared" and not is_recorded(part.device):
        own.objective = CutOut(own.objective, part, members, losses)
    return own


def by_loop(
    part: Passes,
    rho: Number,
    *,
    steps: int = 1,
    stride: float | None = None,
    group: int = 1,
    signs: tuple[float, ...] = (1.0,),
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses at w (N,), norms (G,), and adversarial losses (N,) for each sign, with weights that are really moved."""
    alpha = stride if stride is not None else rho if steps == 1 else 2 * rho / steps
    losses, groups = one_by_one(part, group)
    params = list(part.params.values())
    require_apart(params, part.named)
    norms: list[Tensor] = []
    found: list[list[Tensor]] = [[] for _ in signs]
    for own in groups:
        eps: list[Any] = [torch.zeros_like(p) for p in params]
        one = torch.ones((), device=losses.device)
        for k in range(steps):
            with moved(params, eps, one, consume=False):
                _, grads = own.gradient(keep_side_effects=False)
            norm = global_norm([g for g in grads if g is not None])
            c = step_size(alpha, norm)
            eps = [e if g is None else e + c.to(e.dtype) * g for e, g in zip(eps, grads, strict=True)]
            shrink = (rho / global_norm(eps)).clamp_max(1).nan_to_num(1.0)
            eps = [e * shrink.to(e.dtype) for e in eps]
            if k == 0:
                norms.append(norm / part.scaled(torch.ones_like(norm)) / part.share * losses.shape[0])
        for side, sign in zip(found, signs, strict=True):
            with moved(params, eps, sign * one, consume=False):
                side.append(own.losses())
    return losses, torch.stack(norms), [torch.cat(side) for side in found]
