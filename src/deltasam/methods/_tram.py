"""TRAM: the radius of every step is a trust-region distance between predictions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deltasam.methods._base import Method
from deltasam.methods._buffers import fitted
from deltasam.methods._fields import choice, number, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.objectives import Objective, perturbed_embeddings
from deltasam.objectives.regularisers import Distribution, Embeddings, Side, Site, draw
from deltasam.parallel.ranks import rank
from deltasam.parallel.refusals import require_whole
from deltasam.step.checks import shown
from deltasam.step.passes import ObjectiveLike, Passes
from deltasam.step.radius import Rho
from deltasam.step.randomness import seeded_generator

Against = Literal["noise", "previous"]
"""What the predictions are compared with: those for noisy inputs, or those of the weights of the step before."""


@dataclass(frozen=True, kw_only=True)
class TRAM(Method):
    r"""TRAM: SAM whose radius is the mean divergence of the predictions from those of a neighbour.

    .. math:: d = \tfrac1N \textstyle\sum_i KL(q_i \| p_i), \qquad
              \epsilon^* = \rho\, d\, \nabla l(w) / \lVert \nabla l(w) \rVert_2, \qquad
              \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon^*)

    :math:`p_i` are the class probabilities at w. TRAM-x (``against="noise"``): :math:`q_i` are those for the
    embeddings plus noise :math:`z \sim N(0, \sigma^2)` or :math:`U(-\sigma, \sigma)`, as in R3F. TRAM-theta
    (``against="previous"``): those of the weights at the step before. So the radius is small where the function is
    smooth. All passes see the same dropout masks, and d is due to the neighbour alone.

    This is the paper's method. The released code moves all weights by the same amount: it never multiplies by the
    gradient. It divides the divergence by the number of classes and twice by the batch size; here d is the mean over
    instances. Its option ``adaptive`` (the norm of ASAM), the target :math:`\theta_0` (the pretrained weights) and
    TRAM-Fisher are not implemented.

    The unit of d is nats: it grows with :math:`\sigma^2` and has nothing to do with SAM's 0.05. Choose
    :math:`\sigma` or rho so that :math:`\rho\, d` is near a good radius of SAM; ``step.sharpness`` shows the effect.
    Under autocast the logits are rounded, and a small d is lost in that.

    Cost: 3 forwards, 2 backwards; one extra copy of the parameters, a second one that is kept for TRAM-theta
    (``previous``, in :meth:`state_dict`), and the logits of the batch. A step whose d is 0 is plain training and
    counts as skipped: for TRAM-theta the first one, and every further call between two updates. Accumulate over
    :class:`~deltasam.MicroBatches` instead, which is one call.

    Attributes:
        rho: Factor on the distance; 1 is the method itself, 0 is plain training.
        against: ``"noise"`` or ``"previous"``.
        noise_scale: :math:`\sigma`, the size of the noise. The default is our choice and was not tuned.
        noise: ``"normal"`` or ``"uniform"``.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model gets the noise.
        seed: Seed of the noise, which is not drawn from the streams of dropout.

    Raises:
        TypeError: The objective has no class probabilities to compare.

    References:
        Sherborne et al., TRAM: Bridging Trust Regions and Sharpness Aware Minimization, ICLR 2024 (arXiv:2310.03646).

    Relations:
        :class:`~deltasam.objectives.R3F` adds the distance, in both directions, to the loss instead. With a constant d
        it is :class:`SAM`.

    Example:
        >>> from deltasam import Classification
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> step = TRAM(embeddings="0").backward(model, batch, Classification())
        >>> step.forwards, step.backwards
        (3, 2)
    """

    rho: Rho = radius(1.0)
    against: Against = choice("noise", Against)
    noise_scale: float = number(0.1, open_low=True)
    noise: Distribution = choice("normal", Distribution)
    embeddings: Embeddings = None
    side: Side = choice("encoder", Side)
    seed: int = random_seed()
    cost = "3/2"
    buffers = ("previous",)
    plain_ascent = False

    def _step(self, passes: Passes) -> Step:
        objective: Any = passes.objective
        if not isinstance(objective, Objective) or not objective.directional:
            raise TypeError(
                f"objective={shown(objective)} has no class probabilities, which TRAM compares: pass one that has, "
                "such as Classification() or CausalLM(), or your own deltasam.Objective with directional = True"
            )
        predictions: list[Tensor] = []

        def watched(model: nn.Module, batch: Any) -> Tensor:
            outputs = objective.forward(model, batch)
            predictions.append(outputs.detach())
            return objective.losses(outputs, batch)

        losses, grads = _with_objective(passes, watched).gradient()
        distance = self._distance(passes, objective, predictions)
        with passes.ascend(grads, self.radius * distance) as ascent:
            perturbed = passes.accumulate()
        if self.against == "previous":
            for name, p in passes.trainable.items():
                self._previous(name, p).copy_(p.detach())
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    def _distance(self, passes: Passes, objective: Objective, predictions: list[Tensor]) -> Tensor:
        """d, on the device. The predictions are those of the micro-batches, and are consumed."""
        number = count()

        def divergence(model: nn.Module, batch: Any) -> Tensor:
            k = next(number)
            with self._noisy(model, batch, k) if self.against == "noise" else nullcontext():
                outputs = objective.forward(model, batch)
            return objective.directed(outputs, predictions.pop(0), batch)

        there = _with_objective(passes, divergence)
        if self.against == "noise":
            each = there.losses()
        else:
            params = list(passes.trainable.values())
            require_whole("TRAM(against='previous')", params)
            with torch.no_grad():
                back: list[Tensor | None] = [self._previous(name, p) - p for name, p in passes.trainable.items()]
            with there.move(params, back, torch.ones((), device=passes.device)):
                each = there.losses()
        mean = passes.ranks.mean(each.mean()) if passes.scope == "global" else each.mean()
        return mean.clamp_min(0)  # a divergence near zero can be negative by rounding

    def _previous(self, name: str, p: nn.Parameter) -> Tensor:
        """The weights of the step before; in the first step the current ones."""
        value, key = p.detach(), f"previous.{name}"
        if key in self.state:
            self.state[key] = fitted(self.state[key], p)  # the model may have another dtype now
        return self.table(key, p.shape, device=p.device, dtype=p.dtype, start=lambda t: t.copy_(value))

    def _noisy(self, model: nn.Module, batch: Any, micro_batch: int) -> AbstractContextManager[Any]:
        """A context in which the embeddings are noisy."""

        def noise(site: Site) -> Tensor:
            number = (rank(),) if rank() else ()  # each process draws other noise
            seed = self.step_seed.child(site.index, micro_batch, *number)
            return draw(site, self.noise_scale, self.noise, generator=seeded_generator(site.device, seed))

        return perturbed_embeddings(model, noise, batch=batch, embeddings=self.embeddings, side=self.side)


def _with_objective(passes: Passes, objective: ObjectiveLike) -> Passes:
    """The passes of the same step, which are counted together, with another objective."""
    other = copy(passes)
    other.objective = objective
    return other
