"""The base of regularisers that only add random noise to the input embeddings."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from deltasam.objectives.regularisers._embeddings import Site, perturbed_embeddings
from deltasam.objectives.regularisers._find import Embeddings, Side
from deltasam.objectives.regularisers._wrapper import Wrapper, as_objective


@dataclass(frozen=True)
class NoisyEmbeddings(Wrapper):
    """The wrapped objective, computed with noise on the input embeddings; a subclass draws the noise.

    Args:
        objective: The objective, or any callable ``(model, batch) -> (N,)``.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model gets the noise.
    """

    _: KW_ONLY
    embeddings: Embeddings = None
    side: Side = "encoder"

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", as_objective(self.objective))
        super().__post_init__()

    @abstractmethod
    def noise_of(self, site: Site) -> Tensor:
        """Draws the noise of one call of the embedding layer, from torch's global stream; zero at padding."""

    @abstractmethod
    def is_noisy(self, model: nn.Module) -> bool:
        """Whether there is any noise. Without noise nothing is drawn, as in plain training."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        with self._noisy(model, batch):
            return self.objective.forward(model, batch)

    @property
    def has_unperturbed_part(self) -> bool:
        return self.objective.has_unperturbed_part

    def unperturbed(self, model: nn.Module, batch: Any) -> Tensor | None:
        with self._noisy(model, batch, required=False):
            return self.objective.unperturbed(model, batch)

    def complete(self, model: nn.Module, batch: Any, unperturbed: Tensor) -> Tensor:
        with self._noisy(model, batch):
            return self.objective.complete(model, batch, unperturbed)

    def _noisy(self, model: nn.Module, batch: Any, *, required: bool = True) -> AbstractContextManager[Any]:
        if not self.is_noisy(model):
            return nullcontext()
        return perturbed_embeddings(
            model, self.noise_of, batch=batch, embeddings=self.embeddings, side=self.side, required=required
        )
