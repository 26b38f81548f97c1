"""Virtual adversarial training: the prediction should not change in the direction where it changes most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._checks import check_positive
from deltasam.objectives.regularisers._adversary import EmbeddingConsistency, EmbeddingPasses
from deltasam.objectives.regularisers._noise import draw, uphill


@dataclass(frozen=True)
class VAT(EmbeddingConsistency):
    r"""Virtual adversarial training on the input embeddings, with the clean prediction :math:`p_i` as a constant.

    .. math:: l_i = l(f(E_i), y_i) + \alpha KL(p_i \| f(E_i + r_i)), \qquad
              r_i = \epsilon \frac{g_i}{\lVert g_i \rVert_2}, \;
              g_i = \nabla_r KL(p_i \| f(E_i + r)) \big|_{r = \xi d_i}

    with :math:`d_i` a random unit vector; further ``steps`` of the power iteration replace it by
    :math:`g_i / \lVert g_i \rVert`. Norms are over all real tokens of a row, which is an instance (with DPO one of its
    two answers, of a packed batch several documents). If the divergence of the objective has no direction (regression:
    squared differences), it replaces KL. A gradient that is zero or not finite gives r = 0.

    Cost: 2 + ``steps`` forwards, ``steps`` backwards into the embeddings and 1 through two passes.

    Args:
        objective: The objective to regularise. The adversary does not use labels, so unlabelled data can be used.
        alpha: Weight of the divergence.
        epsilon: Length of the perturbation. The paper's 5.0 is for embeddings normalised to unit variance; word
            embeddings of BERT-like models have a standard deviation of about 0.04, so the default is 5.0 * 0.04.
        xi: Length of the step that the gradient is taken at; the released 0.1, in the same way.
        steps: Power iterations.
        masks: ``"shared"``: all passes see the same dropout masks, without which d is not a small step from p.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model is perturbed.

    References:
        Miyato et al., Virtual Adversarial Training, TPAMI 2018; Adversarial Training Methods for Semi-Supervised Text
        Classification, ICLR 2017.

    Example:
        >>> import torch
        >>> from deltasam import ERM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> ERM().backward(model, batch, VAT(Classification(), embeddings="0")).losses.shape
        torch.Size([4])
    """

    cost = "3/3"
    _: KW_ONLY
    alpha: float = 1.0
    epsilon: float = 0.2
    xi: float = 4e-3
    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("VAT", "alpha", self.alpha)
        check_positive("VAT", "epsilon", self.epsilon)
        check_positive("VAT", "xi", self.xi, zero=False)
        check_positive("VAT", "steps", self.steps, zero=False, whole=True)

    def views(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        """The clean and the virtually adversarial outputs."""
        passes = EmbeddingPasses(self, model, batch)
        clean, sites = passes.clean()
        target = clean.detach()
        unit = [uphill(draw(site, 1.0, "normal"), "l2") for site in sites]
        for _ in range(self.steps):
            gradients = passes.gradient(
                [self.xi * d for d in unit], lambda outputs: self.objective.directed(target, outputs, batch)
            )
            unit = [uphill(g, "l2") for g in gradients]
        return clean, passes.perturbed([self.epsilon * d for d in unit])

    def combine(self, views: Sequence[Tensor], batch: Any) -> Tensor:
        clean, adversarial = views
        divergence = self.objective.directed(clean.detach(), adversarial, batch)
        return self.objective.losses(clean, batch) + self.alpha * divergence
