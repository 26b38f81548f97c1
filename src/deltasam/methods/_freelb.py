"""FreeLB: adversarial word embeddings; every ascent step also trains the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltasam.methods._base import Method
from deltasam.methods._embedding_ascent import EmbeddingAscent, Parts
from deltasam.methods._fields import choice, number, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.objectives.regularisers import Embeddings, Norm, Side, Site, draw, project, uphill
from deltasam.parallel.ranks import rank
from deltasam.step.passes import Ascent, Passes
from deltasam.step.randomness import seeded_generator


@dataclass(frozen=True, kw_only=True)
class FreeLB(Method):
    r"""FreeLB: K passes at word embeddings that ascend the loss; the parameter gradients are averaged over the passes.

    .. math:: \text{gradient} = \frac1K \sum_{t=0}^{K-1} \nabla_w \frac1N \sum_i l(f(E_i + \delta_i^t; w), y_i), \qquad
              \delta_i^{t+1} = \Pi\Bigl(\delta_i^t +
              \alpha \frac{\nabla_\delta l_i}{\lVert \nabla_\delta l_i \rVert}\Bigr)

    with :math:`\delta_i^0 \sim U(-1, 1) \cdot \sigma / \sqrt{T_i H}` for an instance of :math:`T_i` real tokens of H
    entries, and :math:`\Pi` the projection onto the ball of radius ``max_norm``. Norms are per instance, over all its
    tokens; padding is never perturbed. All passes see the same dropout masks. An instance whose gradient is zero or
    not finite stays where it is. K = 1 without initial noise is plain training.

    It works with every objective. If the objective keeps one view unperturbed (:class:`~deltasam.Contrastive`), only
    the other one is perturbed. Encoder-decoder models are perturbed on the encoder's side by default.

    Cost: K forwards, K backwards; a perturbation the size of the embeddings of the batch. ``step.losses`` are those of
    the first pass (with the initial noise, if any), ``step.perturbed_losses`` those of the last.

    Attributes:
        adv_steps: K, the number of passes (``adv_steps + 1`` of the released fairseq code).
        adv_lr: :math:`\alpha`, the length of an ascent step.
        init_magnitude: :math:`\sigma`, the size of the initial noise; with ``linf`` its largest entry.
        max_norm: Radius of the ball; None for no projection (the released code's 0).
        norm: ``"l2"``, or ``"linf"``, in which the step is :math:`\alpha \nabla / \max |\nabla|`.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model is perturbed.
        seed: Seed of the initial noise, which is not drawn from the streams of dropout.

    The defaults are the released ones for MNLI; :doc:`/methods` has those of the other GLUE tasks.

    References:
        Zhu et al., FreeLB: Enhanced Adversarial Training for Natural Language Understanding, ICLR 2020.

    Example:
        >>> import torch
        >>> from deltasam import Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> step = FreeLB(adv_steps=3, embeddings="0").backward(model, batch, Classification())
        >>> step.forwards, step.backwards
        (3, 3)
    """

    adv_steps: int = number(3, low=1, whole=True)
    adv_lr: float = number(0.1)
    init_magnitude: float = number(0.1)
    max_norm: float | None = number(0.3, open_low=True, optional=True)
    norm: Norm = choice("l2", Norm)
    embeddings: Embeddings = None
    side: Side = "encoder"
    seed: int = random_seed()
    cost = "K/K"
    perturbs = "embeddings"

    def is_erm(self) -> bool:
        """Whether nothing moves the embeddings: no initial noise, and no ascent step or steps of length 0."""
        return self.init_magnitude == 0 and (self.adv_lr == 0 or self.adv_steps == 1)

    def _step(self, passes: Passes) -> Step:
        passes.scope = "local"  # a perturbation belongs to one instance
        ascent = EmbeddingAscent(
            passes, self.adv_steps, self._start, goal=self._goal(passes), embeddings=self.embeddings, side=self.side
        )
        first_move: Ascent | None = None
        with passes.fresh_grads():  # if a pass fails, .grad holds no part of this step
            losses = last = ascent.accumulate()
            for _ in range(self.adv_steps - 1):
                move = ascent.move(self._move)
                first_move = first_move or move
                last = ascent.accumulate()
        self._finish(ascent)
        return make_step(passes, losses, perturbed=last if self.adv_steps > 1 else None, ascent=first_move)

    def _start(self, site: Site, micro_batch: int) -> Parts:
        """The initial noise, from its own stream, so that a step consumes the random draws of plain training."""
        if self.init_magnitude == 0:
            return [site.empty().zero_()]
        number = (rank(),) if rank() else ()  # each process draws other noise
        seed = self.step_seed.child(site.index, micro_batch, *number)
        noise = draw(site, 1.0, generator=seeded_generator(site.device, seed))
        if self.norm == "linf":
            return [noise * self.init_magnitude]
        return [noise * (self.init_magnitude / (site.lengths() * site.shape[-1]).sqrt())]

    def _goal(self, passes: Passes) -> Any:
        """What to ascend; None for the loss."""
        return None

    def _move(self, site: Site, parts: Parts, gradients: Parts) -> Parts:
        """One ascent step and the projection."""
        delta = parts[0] + self.adv_lr * uphill(site.unpadded(gradients[0]), self.norm)
        return [delta if self.max_norm is None else project(delta, self.max_norm, self.norm)]

    def _finish(self, ascent: EmbeddingAscent) -> None:
        """Keeps what the next step needs: nothing here."""
