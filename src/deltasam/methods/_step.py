"""The record of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasam.step.passes import Ascent, Passes


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    r"""What happened in one step. All tensors are detached and on the model's device; nothing here synchronises.

    Attributes:
        losses: :math:`l_i(w)`, shape (N,). Methods with a single pass (RandomPerturbation, MomentumSAM, BiLoRA) have
            those at the perturbed weights instead.
        forwards: Number of forward passes; a sweep over micro-batches is one. Passes that only verify something, or
            that fail, are not counted.
        backwards: Number of backward passes, counted likewise.
        perturbed_losses: :math:`l_i(w + \epsilon)`, shape (N,), or None if nothing was perturbed.
        weights: g, shape (N,), if the method weights the instances.
        grad_norm: Norm of the gradient that the ascent followed, without the loss scale.
        skipped: Whether the perturbation was skipped because that gradient was zero or not finite. The step is then
            the plain gradient.
        radius: Norm of the perturbation, in the norm of the method; with perturbations per instance, their mean.
        arrived: Inside :func:`deltasam.measured_arrival`: the share of the perturbation that arrived where the weights
            are used, which may be in lower precision than they are stored in.

    Example:
        >>> from torch import nn
        >>> from deltasam import SAM
        >>> model, objective = nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SAM(rho=0.05).backward(model, torch.ones(4, 2), objective)
        >>> sorted(step.metrics())
        ['grad_norm', 'loss', 'radius', 'sharpness', 'skipped']
        >>> step.why_skipped is None
        True
    """

    losses: Tensor
    forwards: int
    backwards: int
    perturbed_losses: Tensor | None = None
    weights: Tensor | None = None
    grad_norm: Tensor | None = None
    skipped: Tensor | None = None
    arrived: Tensor | None = None
    radius: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The objective of the batch: the mean of the losses."""
        return self.losses.mean()

    @property
    def sharpness(self) -> Tensor:
        """How much the perturbation raised the mean loss: R_batch or R_inst, depending on the method.

        0 where it is not measured: in plain training, and by methods with a single pass.
        """
        if self.perturbed_losses is None:
            return torch.zeros_like(self.losses[0])
        return self.perturbed_losses.mean() - self.losses.mean()

    @property
    def why_skipped(self) -> str | None:
        """Why the perturbation was skipped, or None if it was not. Synchronises with the device."""
        if self.skipped is None or not bool(self.skipped):
            return None
        norm = float("nan") if self.grad_norm is None else float(self.grad_norm)
        what = f"zero or too small to divide by ({norm:g})" if abs(norm) < 1 else f"not finite ({norm:g})"
        return f"the norm of the perturbation gradient was {what}; the step took the plain gradient"

    def metrics(self) -> dict[str, float]:
        """The step as numbers for a log. Synchronises with the device."""
        values: dict[str, Any] = {"loss": self.loss, "sharpness": self.sharpness, "grad_norm": self.grad_norm}
        values["radius"] = self.radius
        if self.weights is not None:
            values |= {"weights_mean": self.weights.mean(), "weights_max": self.weights.max()}
            values["weights_std"] = self.weights.std(unbiased=False)
        values |= {"skipped": self.skipped, "arrived": self.arrived}
        return {name: float(value) for name, value in values.items() if value is not None}


def make_step(
    passes: Passes,
    losses: Tensor,
    *,
    perturbed: Tensor | None = None,
    ascent: Ascent | None = None,
    weights: Tensor | None = None,
) -> Step:
    """The record of a finished step.

    Args:
        passes: The passes of the step, which count themselves.
        losses: The losses at w, shape (N,).
        perturbed: The losses at the perturbed weights, shape (N,).
        ascent: What ``passes.ascend`` yielded.
        weights: g, shape (N,), if the method weights the instances.
    """
    forwards, backwards = passes.count.sweeps
    return Step(
        losses=losses,
        forwards=forwards,
        backwards=backwards,
        perturbed_losses=perturbed,
        weights=weights,
        grad_norm=None if ascent is None else ascent.norm,
        skipped=None if ascent is None else ascent.skipped,
        arrived=None if ascent is None else ascent.arrived,
        radius=None if ascent is None else ascent.radius,
    )


def plain_step(passes: Passes) -> Step:
    """Plain training: one forward, one backward, nothing else."""
    return make_step(passes, passes.accumulate(keep_side_effects=True))
