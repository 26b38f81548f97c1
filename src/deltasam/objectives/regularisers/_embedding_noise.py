"""Random noise on the input embeddings, and nothing else."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor, nn

from deltasam.objectives._checks import check_choice, check_positive
from deltasam.objectives.regularisers._embeddings import Site
from deltasam.objectives.regularisers._noise import Distribution, draw
from deltasam.objectives.regularisers._noisy import NoisyEmbeddings


@dataclass(frozen=True)
class EmbeddingNoise(NoisyEmbeddings):
    r"""The wrapped objective with :math:`z \sim U(-s, s)` added to every entry of the input embeddings.

    .. math:: l_i = l(f(E(x_i) + z_i), y_i)

    These are the paper's "w/ random noise" rows in STS, and also its "R3F" row there: "simply adding random noise to
    input embedding". It combines with every method; within one step all passes see the same noise and the same dropout
    masks. Padding gets no noise.

    The noise is part of the objective, also in ``model.eval()``: evaluate with the wrapped objective.

    Cost: only the draw.

    Args:
        objective: The objective, or any callable ``(model, batch) -> (N,)``.
        scale: s; the paper searches 0.01 to 0.5 and finds 0.1 (Mirror-BERT) and 0.2 (Mirror-RoBERTa). 0 changes
            nothing.
        noise: ``"uniform"``, the paper's, or ``"normal"`` with standard deviation s.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model gets the noise.

    Example:
        >>> import torch
        >>> from deltasam import DeltaSAM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> noisy = EmbeddingNoise(Classification(), scale=0.1, embeddings="0")
        >>> DeltaSAM(rho=0.1, eta=1.0).backward(model, batch, noisy).losses.shape
        torch.Size([4])
    """

    cost = "1/1"
    _: KW_ONLY
    scale: float = 0.1
    noise: Distribution = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("EmbeddingNoise", "scale", self.scale)
        check_choice("EmbeddingNoise", "noise", self.noise, Distribution)

    def noise_of(self, site: Site) -> Tensor:
        return draw(site, self.scale, self.noise)

    def is_noisy(self, model: nn.Module) -> bool:
        return self.scale != 0
