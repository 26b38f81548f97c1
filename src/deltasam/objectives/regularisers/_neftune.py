"""NEFTune: uniform noise on the input embeddings in training, scaled by the length of the text."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor, nn

from deltasam.objectives._checks import check_positive
from deltasam.objectives.regularisers._embeddings import Site
from deltasam.objectives.regularisers._noise import draw
from deltasam.objectives.regularisers._noisy import NoisyEmbeddings


@dataclass(frozen=True)
class NEFTune(NoisyEmbeddings):
    r"""The wrapped objective with noise on the input embeddings, smaller for longer texts; only in training.

    .. math:: l_i = l(f(E(x_i) + z_i), y_i), \qquad z_i \sim U(-1, 1) \cdot \alpha / \sqrt{T_i H}

    for an instance of :math:`T_i` real tokens with embeddings of H entries, so that the norm of the noise is about
    :math:`\alpha / \sqrt 3` for every text. Within one step all passes see the same noise and the same dropout masks.
    In ``model.eval()`` there is no noise. A packed row counts as one text.

    Padding gets no noise and does not count, as in the authors' training code. Hugging Face's ``neftune_noise_alpha``
    (and the snippet in the authors' README) counts padding: there the noise of a text depends on the longest one in
    its batch, and on ``pad_to_multiple_of``.

    Cost: only the draw.

    Args:
        objective: The objective, or any callable ``(model, batch) -> (N,)``.
        alpha: Size of the noise; the paper uses 5, 10 and 15. 0 changes nothing.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model gets the noise.

    References:
        Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, ICLR 2024.

    Relations:
        :class:`EmbeddingNoise` has noise of one size for all texts, also in evaluation. :class:`~deltasam.FreeLB`
        starts its ascent from this noise.

    Example:
        >>> import torch
        >>> from deltasam import ERM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> noisy = NEFTune(Classification(), alpha=5.0, embeddings="0")
        >>> ERM().backward(model, batch, noisy).losses.shape
        torch.Size([4])
        >>> bool((noisy(model.eval(), batch) == Classification()(model, batch)).all())
        True
    """

    cost = "1/1"
    _: KW_ONLY
    alpha: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("NEFTune", "alpha", self.alpha)

    def noise_of(self, site: Site) -> Tensor:
        return draw(site, 1.0) * (self.alpha / (site.lengths() * site.shape[-1]).sqrt())

    def is_noisy(self, model: nn.Module) -> bool:
        return self.alpha != 0 and model.training
