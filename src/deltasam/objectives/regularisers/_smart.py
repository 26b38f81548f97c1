"""SMART: smoothness under small adversarial noise, and proximity to earlier weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.objectives._checks import check_choice, check_positive
from deltasam.objectives.regularisers._adversary import EmbeddingConsistency, EmbeddingPasses
from deltasam.objectives.regularisers._noise import Norm, draw, project, uphill
from deltasam.objectives.regularisers._teacher import Teacher


@dataclass(frozen=True)
class SMART(EmbeddingConsistency):
    r"""SMART: smoothness-inducing adversarial regularisation and the momentum Bregman proximal point term.

    .. math:: l_i = l(f(E_i; w), y_i)
              + \lambda_s \max_{\lVert \delta \rVert_p \le \epsilon} D(f(E_i; w), f(E_i + \delta; w))
              + \mu D(f(E_i; w), f(E_i; \tilde w)), \qquad D(p, q) = KL(p \| q) + KL(q \| p)

    and :math:`D(a, b) = (a - b)^2` for regression. The maximum is approximated by projected ascent from
    :math:`\delta \sim N(0, \sigma^2)`: ``steps`` times :math:`\delta \leftarrow \Pi(\delta + \eta \, g / \lVert g
    \rVert_p)`, with g the gradient of D and :math:`\Pi` the projection onto the ball. (Public implementations divide
    by the norm and never multiply by :math:`\epsilon`: their noise is sixteen times as large as the embeddings.) The
    noise is a constant for the outer gradient. A gradient that is not finite does not change the noise.

    The teacher :math:`\tilde w` is a moving average of the weights, :math:`\tilde w \leftarrow \beta \tilde w + (1 -
    \beta) w`, :math:`\beta = 0.99` in the first tenth of the updates, then 0.999. It moves when a step starts
    (:meth:`prepare`, which every method calls); save its state in checkpoints. With gradient accumulation pass all
    parts of a step as :class:`~deltasam.MicroBatches`: several calls of ``backward`` move it several times.

    Cost: 2 + ``steps`` forwards, ``steps`` backwards into the embeddings and 1 through two passes; with the proximal
    term one more forward, and one copy of the trainable parameters.

    At the paper's :math:`\epsilon = 10^{-5}` D is near the rounding error of float32 and below that of bfloat16: under
    autocast its value is mostly noise. This is a property of the method; larger radii help.

    Args:
        objective: The objective to regularise.
        lam: :math:`\lambda_s`; the paper uses 1, 3 and 5.
        mu: Weight of the proximal term; 0 omits the term and the teacher.
        epsilon: Radius of the ball.
        sigma: Standard deviation of the initial noise, which is projected onto the ball as well.
        eta: Step of the ascent.
        steps: Number of ascent steps.
        norm: ``"linf"``, the paper's, or ``"l2"`` over all real tokens of an instance.
        total_steps: Updates of the whole run; needed for the teacher's schedule.
        beta: Momentum of the teacher in the first ``early`` part of the updates.
        late_beta: Momentum afterwards.
        early: The fraction of the updates that use ``beta``.
        masks: ``"shared"``: all passes see the same dropout masks, so that D is caused by the noise alone;
            ``"independent"``: as in public implementations.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model is perturbed.

    References:
        Jiang et al., SMART: Robust and Efficient Fine-Tuning for Pre-trained Natural Language Models through
        Principled Regularized Optimization, ACL 2020.

    Example:
        >>> import torch
        >>> from deltasam import ERM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> smart = SMART(Classification(), total_steps=1000, embeddings="0")
        >>> ERM().backward(model, batch, smart).losses.shape
        torch.Size([4])
    """

    cost = "4/3"
    _: KW_ONLY
    lam: float = 1.0
    mu: float = 1.0
    epsilon: float = 1e-5
    sigma: float = 1e-5
    eta: float = 1e-3
    steps: int = 1
    norm: Norm = "linf"
    total_steps: int | None = None
    beta: float = 0.99
    late_beta: float = 0.999
    early: float = 0.1
    teacher: Teacher = field(default_factory=Teacher, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lam", "mu", "epsilon", "sigma", "eta"):
            check_positive("SMART", name, getattr(self, name))
        check_positive("SMART", "steps", self.steps, whole=True)
        check_choice("SMART", "norm", self.norm, Norm)
        for name in ("beta", "late_beta", "early"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"SMART({name}={getattr(self, name)!r}): must be a number from 0 to 1")
        if self.total_steps is not None:
            check_positive("SMART", "total_steps", self.total_steps, zero=False, whole=True)
        elif self.mu > 0:
            raise ValueError(
                "SMART(total_steps=None): the teacher's momentum changes after a tenth of the run: pass the number of "
                "updates, SMART(total_steps=...), or omit the proximal term, SMART(mu=0)"
            )

    def prepare(self, model: nn.Module) -> None:
        """Moves the teacher towards the model at w; in the first step it becomes a copy of the model."""
        super().prepare(model)
        if self.mu > 0 and self.total_steps is not None:
            early = self.teacher.updates < self.early * self.total_steps
            self.teacher.move(model, self.beta if early else self.late_beta)

    def views(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        """The clean and the adversarial outputs, and those of the teacher."""
        passes = EmbeddingPasses(self, model, batch)
        clean, sites = passes.clean()
        target = clean.detach()
        deltas = [project(draw(site, self.sigma, "normal"), self.epsilon, self.norm) for site in sites]
        for _ in range(self.steps):
            gradients = passes.gradient(deltas, lambda outputs: self.both_directions(target, outputs, batch))
            moved = [d + self.eta * uphill(g, self.norm) for d, g in zip(deltas, gradients, strict=True)]
            deltas = [project(d, self.epsilon, self.norm) for d in moved]
        views = [clean, passes.perturbed(deltas)]
        if self.mu > 0:
            with torch.no_grad(), passes.masks():
                views.append(self.objective.forward(self.teacher.model_like(model), batch))
        return views

    def combine(self, views: Sequence[Tensor], batch: Any) -> Tensor:
        clean, adversarial = views[:2]
        losses = self.objective.losses(clean, batch) + self.lam * self.both_directions(clean, adversarial, batch)
        if self.mu == 0:
            return losses
        return losses + self.mu * self.both_directions(clean, views[2].detach(), batch)

    def _own_state(self) -> dict[str, Any]:
        return self.teacher.state_dict() if self.mu > 0 else {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if self.mu > 0:
            self.teacher.load_state_dict(state)
        else:
            super()._load_own_state(state)
