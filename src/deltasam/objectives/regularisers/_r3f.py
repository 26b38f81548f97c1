"""R3F: the prediction should not change under small random noise on the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives._checks import check_choice, check_positive
from deltasam.objectives.regularisers._adversary import EmbeddingConsistency, EmbeddingPasses, Masks
from deltasam.objectives.regularisers._noise import Distribution, draw


@dataclass(frozen=True)
class R3F(EmbeddingConsistency):
    r"""R3F: the loss of the clean pass, and the symmetric divergence from a pass with noise on the embeddings.

    .. math:: l_i = l(f(E_i), y_i) + \lambda [KL(p_i \| q_i) + KL(q_i \| p_i)], \qquad q_i = f(E_i + z_i), \;
              z \sim U(-\epsilon, \epsilon) \text{ or } N(0, \epsilon^2)

    The gradient goes through both passes. For regression the bracket is :math:`(f - f')^2`. This is our choice: the
    released code adds nothing there, and the paper has no STS-B result.

    Cost: 2 forwards, 1 backward through both; the activations of both.

    Args:
        objective: The objective to regularise.
        eps: Size of the noise.
        lam: :math:`\lambda`; the paper's grid is 0.1, 0.5, 1, 5.
        noise: ``"uniform"``, the released choice for classification, or ``"normal"``, that for generation.
        masks: ``"independent"``: the noisy pass draws its own dropout masks, as in the released code, so that the
            divergence reflects both. ``"shared"``: it reflects only the noise (without dropout they are the same).
        detach_embeddings: Stop the noisy pass from sending gradient into the embedding table, as the released code
            does and the paper's formula does not.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model gets the noise.

    References:
        Aghajanyan et al., Better Fine-Tuning by Reducing Representational Collapse, ICLR 2021.

    Example:
        >>> import torch
        >>> from deltasam import ERM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> ERM().backward(model, batch, R3F(Classification(), eps=1e-3, embeddings="0")).losses.shape
        torch.Size([4])
    """

    cost = "2/2"
    _: KW_ONLY
    eps: float = 1e-5
    lam: float = 1.0
    noise: Distribution = "uniform"
    masks: Masks = "independent"
    detach_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("R3F", "eps", self.eps)
        check_positive("R3F", "lam", self.lam)
        check_choice("R3F", "noise", self.noise, Distribution)

    def views(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        """The clean and the noisy outputs."""
        passes = EmbeddingPasses(self, model, batch)
        clean, sites = passes.clean()
        # Drawn between the passes: noise drawn inside the noisy pass would shift its dropout masks.
        noise = [draw(site, self.eps, self.noise) for site in sites]
        return clean, passes.perturbed(noise, detach=self.detach_embeddings)

    def combine(self, views: Sequence[Tensor], batch: Any) -> Tensor:
        clean, noisy = views
        return self.objective.losses(clean, batch) + self.lam * self.both_directions(clean, noisy, batch)
