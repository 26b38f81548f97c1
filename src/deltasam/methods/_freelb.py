"""FreeLB: adversarial training on the word embeddings, whose ascent steps also train the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from deltasam.methods._base import Method, Step, check_number, make_step
from deltasam.methods._embedding_ascent import EmbeddingAscent, Parts
from deltasam.objectives.regularisers import Embeddings, Norm, Side, Site, draw, project, uphill
from deltasam.parallel.ranks import rank
from deltasam.step.passes import Ascent, Passes
from deltasam.step.randomness import Seed, seeded_generator


@dataclass(frozen=True, kw_only=True)
class FreeLB(Method):
    r"""FreeLB: K passes at word embeddings that go uphill, the parameter gradients averaged over them.

    .. math:: \text{gradient} = \frac1K \sum_{t=0}^{K-1} \nabla_w \frac1N \sum_i l(f(E_i + \delta_i^t; w), y_i), \qquad
              \delta_i^{t+1} = \Pi\Bigl(\delta_i^t +
              \alpha \frac{\nabla_\delta l_i}{\lVert \nabla_\delta l_i \rVert}\Bigr)

    with :math:`\delta_i^0 \sim U(-1, 1) \cdot \sigma / \sqrt{T_i H}` for an instance of :math:`T_i` real tokens of H
    entries, and :math:`\Pi` the projection onto the ball of radius ``max_norm``. Norms are per instance, over all its
    tokens; padding is never perturbed. All passes see the same dropout masks. An instance whose gradient is zero or
    not finite stays where it is. K = 1 without initial noise is plain training.

    Every objective will do. Of an objective that holds one view still (:class:`~deltasam.Contrastive`) only the other
    one is perturbed. Encoder-decoder models are perturbed on the encoder's side by default.

    Cost: K forwards, K backwards; a perturbation the size of the embeddings of the batch. ``step.losses`` are those of
    the first pass (with the initial noise, if any), ``step.perturbed_losses`` those of the last.

    Attributes:
        adv_steps: K, all passes counted (``adv_steps + 1`` of the released fairseq code).
        adv_lr: :math:`\alpha`, the length of an ascent step.
        init_magnitude: :math:`\sigma`, the size of the initial noise; with ``linf`` its largest entry.
        max_norm: Radius of the ball; None for no projection (the released code's 0).
        norm: ``"l2"``, or ``"linf"``, in which the step is :math:`\alpha \nabla / \max |\nabla|`.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model is perturbed.
        seed: Seed of the initial noise, which is drawn apart from the streams of dropout.

    The defaults are the released ones for MNLI. Those for RoBERTa-large, K including the first pass:

    =====  =======  =========  ==============  ========
    task   adv_lr   adv_steps  init_magnitude  max_norm
    =====  =======  =========  ==============  ========
    MNLI   0.1      3          0.1             0.3
    QNLI   0.1      3          0.2             0.2
    QQP    0.2      3          0.32            0.7
    SST-2  0.1      3          1.0             0.6
    MRPC   0.04     4          0.64            0.4
    CoLA   0.025    4          0.4             0.3
    STS-B  0.1      4          0.16            0.28
    RTE    0.06     4          0.16            0.14
    =====  =======  =========  ==============  ========

    References:
        Zhu et al., FreeLB: Enhanced Adversarial Training for Natural Language Understanding, ICLR 2020.

    Example:
        >>> from deltasam import Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> step = FreeLB(adv_steps=3, embeddings="0").backward(model, batch, Classification())
        >>> step.forwards, step.backwards
        (3, 3)
    """

    adv_steps: int = 3
    adv_lr: float = 0.1
    init_magnitude: float = 0.1
    max_norm: float | None = 0.3
    norm: Norm = "l2"
    embeddings: Embeddings = None
    side: Side = "encoder"
    seed: int = 0
    cost = "K/K"
    state_keys = frozenset()
    capturable = True

    def __post_init__(self) -> None:
        """Checks the hyperparameters."""
        super().__post_init__()
        check_number("adv_steps", self.adv_steps, 1, whole=True)
        check_number("seed", self.seed, -math.inf, whole=True)
        check_number("adv_lr", self.adv_lr, 0)
        check_number("init_magnitude", self.init_magnitude, 0)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, 0, open_low=True)
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm={self.norm!r} must be one of {list(get_args(Norm))}")

    def is_erm(self) -> bool:
        """Whether the embeddings stay where they are: they start there, and no step follows, or steps of length 0."""
        return self.init_magnitude == 0 and (self.adv_lr == 0 or self.adv_steps == 1)

    def _needs_whole(self) -> bool:
        return False  # no parameter is perturbed

    def _step(self, passes: Passes) -> Step:
        passes.scope = "local"  # the perturbations are the instances' own
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
        """Initial noise, from a stream of its own: the number of draws in a step is that of plain training."""
        if self.init_magnitude == 0:
            return [site.empty().zero_()]
        noise = draw(site, 1.0, generator=self._generator(site, micro_batch))
        if self.norm == "linf":
            return [noise * self.init_magnitude]
        return [noise * (self.init_magnitude / (site.lengths() * site.shape[-1]).sqrt())]

    def _generator(self, site: Site, *which: int) -> torch.Generator:
        number = (rank(),) if rank() else ()  # instances of other processes have noise of their own
        return seeded_generator(site.device, Seed(self.seed, self.steps, (site.index, *which, *number)))

    def _goal(self, passes: Passes) -> Any:
        """What to go uphill on; None for the loss."""
        return None

    def _move(self, site: Site, parts: Parts, gradients: Parts) -> Parts:
        """One ascent step and the projection."""
        return [self._projected(parts[0] + self.adv_lr * uphill(site.unpadded(gradients[0]), self.norm))]

    def _projected(self, delta: Tensor) -> Tensor:
        return delta if self.max_norm is None else project(delta, self.max_norm, self.norm)

    def _finish(self, ascent: EmbeddingAscent) -> None:
        """What is remembered for the next step: nothing."""
