"""R-Drop: two passes with different dropout masks should agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from deltasam.objectives._base import Objective
from deltasam.objectives._checks import check_choice, check_positive
from deltasam.objectives.regularisers._wrapper import Consistency, Wrapper
from deltasam.step.batches import batch_size, repeat

ForwardPasses = Literal["one", "two"]
Reduction = Literal["paper", "released"]


@dataclass(frozen=True)
class RDrop(Consistency):
    r"""R-Drop: mean loss of two passes with different dropout masks, and the divergence between them.

    .. math:: l_i = \tfrac12 (l_i^1 + l_i^2) + \alpha \tfrac12 [KL(p_i^1 \| p_i^2) + KL(p_i^2 \| p_i^1)]

    If the divergence of the objective has no direction, it replaces half the bracket: for regression
    :math:`\alpha (f_i^1 - f_i^2)^2`. Without dropout R-Drop is the wrapped objective.

    Cost: the forward and backward of a batch twice as large, and its activation memory; with ``passes="two"`` two
    forwards and one backward through both.

    Args:
        objective: The objective to regularise.
        alpha: Weight of the divergence; the paper chooses from 0.1, 0.5, 1.0, and more for translation.
        passes: ``"one"``: one forward of the batch joined with itself. ``"two"``: two forwards, with half the peak
            memory of a single forward, for models or objectives that mix the instances of a batch (BatchNorm, in-batch
            negatives), and for code that expects row i of a layer to belong to instance i (the exact per-instance
            methods of this package work with both).
        reduction: ``"paper"``, the formula above. ``"released"``: the released code for BERT, which *sums* the
            divergence over the batch (over its target tokens, for sequences) and the two losses,
            :math:`l_i^1 + l_i^2 + \alpha N \cdot \text{divergence}_i`, there with :math:`\alpha = 0.5`: in the terms
            of the paper's formula alpha is N/4 there, 8 at a batch of 32, and depends on the batch size. Squared
            differences are averaged there too, so for regression only the losses double.

    References:
        Liang et al., R-Drop: Regularized Dropout for Neural Networks, NeurIPS 2021.

    Example:
        >>> import torch
        >>> from deltasam import ERM, Classification
        >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
        >>> batch = (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
        >>> ERM().backward(model, batch, RDrop(Classification(), alpha=1.0)).losses.shape
        torch.Size([4])
    """

    cost = "2/2"
    _: KW_ONLY
    alpha: float = 1.0
    passes: ForwardPasses = "one"
    reduction: Reduction = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("RDrop", "alpha", self.alpha)
        check_choice("RDrop", "passes", self.passes, ForwardPasses)
        check_choice("RDrop", "reduction", self.reduction, Reduction)

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.objective.separable and self.reduction == "paper"  # the released one depends on N

    @property
    def mixing(self) -> str:  # type: ignore[override]
        return "sums divergences over the batch (reduction='released')" if self.objective.separable else super().mixing

    def views(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        """Two outputs with different dropout masks."""
        if self.passes == "two":
            return self.objective.forward(model, batch), self.objective.forward(model, batch)
        size = batch_size(batch)
        if size is None:
            raise ValueError(
                "RDrop(passes='one'): the batch contains no tensors that could be joined; use passes='two'"
            )
        outputs = self.objective.forward(model, repeat(batch, 2, size))
        dim = _instance_dim(self.objective)
        if outputs.ndim <= dim or outputs.shape[dim] != 2 * size:
            raise ValueError(
                f"RDrop(passes='one'): a batch of {size} instances, joined with itself, gave outputs of shape "
                f"{tuple(outputs.shape)}, not {2 * size} rows; use passes='two'"
            )
        first, second = outputs.narrow(dim, 0, size), outputs.narrow(dim, size, size)
        return first, second

    def combine(self, views: Sequence[Tensor], batch: Any) -> Tensor:
        first, second = views
        losses = self.objective.losses(first, batch) + self.objective.losses(second, batch)
        divergence = self.objective.divergence(first, second, batch)
        if self.reduction == "paper":
            return 0.5 * losses + self.alpha * divergence
        items = self.objective.items(batch)
        summed = len(losses) if items is None else items.to(losses.device)
        return losses + self.alpha * (summed if self.objective.directional else 1) * divergence


def _instance_dim(objective: Objective) -> int:
    """The dimension of the instances in the outputs: wrappers put the dimension of their views first."""
    inner, dim = objective, 0
    while isinstance(inner, Wrapper):
        dim += isinstance(inner, Consistency)
        inner = inner.objective
    return dim
