"""The base of R3F, SMART and VAT: a clean pass, then passes with perturbed embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deltasam.objectives._checks import check_choice
from deltasam.objectives.regularisers._embeddings import Noise, Site, perturbed_embeddings
from deltasam.objectives.regularisers._find import Embeddings, Side
from deltasam.objectives.regularisers._wrapper import Consistency
from deltasam.step.randomness import Replay, accelerators

Masks = Literal["shared", "independent"]


@dataclass(frozen=True)
class EmbeddingConsistency(Consistency):
    """A consistency objective that perturbs the input embeddings.

    Args:
        objective: The objective to regularise.
        masks: Whether the perturbed passes use the dropout masks of the clean one (``"shared"``) or draw new ones.
        embeddings: The embedding layer, its name, or a predicate; None finds the word embeddings.
        side: Which side of an encoder-decoder model is perturbed.
    """

    _: KW_ONLY
    masks: Masks = "shared"
    embeddings: Embeddings = None
    side: Side = "encoder"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(type(self).__name__, "masks", self.masks, Masks)
        check_choice(type(self).__name__, "side", self.side, Side)


class EmbeddingPasses:
    """The clean pass over a batch, then passes with perturbed embeddings and, if shared, the same dropout masks."""

    def __init__(self, owner: EmbeddingConsistency, model: nn.Module, batch: Any) -> None:
        self._owner, self._model, self._batch = owner, model, batch
        shared = owner.masks == "shared"
        self._replay = Replay(model, accelerators(model.parameters())) if shared else None

    def clean(self) -> tuple[Tensor, list[Site]]:
        """The clean outputs and the sites of the embeddings; must be the first pass."""
        masks = nullcontext() if self._replay is None else self._replay.at_w()
        return self._forward(masks, None)

    def masks(self) -> AbstractContextManager[None]:
        """The random streams of a further pass."""
        return nullcontext() if self._replay is None else self._replay.extra()

    def perturbed(self, deltas: Sequence[Tensor], *, detach: bool = False) -> Tensor:
        """Outputs for the embeddings plus the deltas, one delta for every site."""
        return self._forward(self.masks(), lambda site: deltas[site.index], detach)[0]

    def gradient(self, deltas: Sequence[Tensor], distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """Gradient of ``distance(outputs)``, summed, with respect to the deltas alone; also under ``no_grad``."""
        leaves = [delta.detach().requires_grad_() for delta in deltas]
        with torch.enable_grad():
            total = distance(self.perturbed(leaves)).sum()
        # A backward pass must not run in the user's autocast region, which surrounds this.
        with torch.autocast(total.device.type, enabled=False):
            return torch.autograd.grad(total, leaves)

    def _forward(
        self, masks: AbstractContextManager[None], noise: Noise | None, detach: bool = False
    ) -> tuple[Tensor, list[Site]]:
        owner = self._owner
        where: dict[str, Any] = {"batch": self._batch, "embeddings": owner.embeddings, "side": owner.side}
        with masks, perturbed_embeddings(self._model, noise, detach=detach, **where) as sites:
            return owner.objective.forward(self._model, self._batch), list(sites)
