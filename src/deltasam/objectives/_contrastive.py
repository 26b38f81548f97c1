"""Contrastive learning of sentence embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.objectives._base import Objective, at_least_float32
from deltasam.objectives._checks import check_choice
from deltasam.objectives.batch import Predict, call, describe, is_pair, tensor_of

Pooling = Literal["mean-all", "mean", "cls"]
Adversary = Literal["second", "both"]


@dataclass(frozen=True, kw_only=True)
class Contrastive(Objective):
    r"""Rows of NT-Xent over two views of every instance, as in Mirror-BERT and SimCSE.

    With the L2-normalised embeddings of the 2N views, :math:`s_{ab}` their cosines and p(a) the other view of a,

    .. math:: n_a = -\log \frac{e^{s_{a,p(a)}/\tau}}{\sum_{b \ne a} e^{s_{ab}/\tau}}, \qquad
              l_i = \tfrac12 (n_i + n_{i+N}),

    whose mean is NT-Xent over the 2N anchors, in float32 at least, also under autocast (at :math:`\tau = 0.04`
    bfloat16 cosines would be off by 0.1 after the division). Two equal sentences in a batch are negatives of each
    other, as in the original.

    A batch is ``{"first": view, "second": view}`` or a pair ``(view, view)``. A view is an input of the encoder: a
    mapping, a tuple or a tensor. The outputs are the embeddings, shape (2, N, H). The loss of an instance depends on
    the others of its batch (``separable`` is False): cutting a batch changes the objective. The divergence is
    :math:`1 - \cos` between two embeddings of the same view, averaged over the two views.

    Args:
        temperature: :math:`\tau`, 0.04 in Mirror-BERT.
        pooling: From token embeddings (N, T, H) to one embedding: ``"mean-all"`` over all positions, padding included
            (what Mirror-BERT does), ``"mean"`` over those of the attention mask, ``"cls"`` the first (Mirror-RoBERTa).
            Outputs of shape (N, H) are used as they are.
        adversary: Which view sees perturbed weights: ``"second"``, the paper's choice, "much better" than ``"both"``:
            :math:`h_1 = \mathrm{enc}(x_1; w)`, :math:`h_2 = \mathrm{enc}(x_2; w + \epsilon)`, see
            :meth:`unperturbed`. Inside R-Drop, R3F, SMART and VAT both views see them.
        predict: How to get embeddings from a view, ``predict(model, view)``, if a plain call of the model is not
            enough.

    Raises:
        ValueError: The batch does not have two views with the same number of instances, or has only one instance and
            so no negatives.

    Example:
        >>> import torch
        >>> encoder, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
        >>> Contrastive()(encoder, (x, x + 0.1 * torch.randn(4, 5))).shape
        torch.Size([4])

    References:
        Liu et al. 2021, Fast, Effective, and Self-Supervised: Transforming Masked Language Models into Universal
        Lexical and Sentence Encoders.
    """

    separable: ClassVar[bool] = False

    temperature: float = 0.04
    pooling: Pooling = "mean-all"
    adversary: Adversary = "second"
    predict: Predict | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, but must be a number above 0 (Mirror-BERT: 0.04)")
        check_choice("Contrastive", "pooling", self.pooling, Pooling)
        check_choice("Contrastive", "adversary", self.adversary, Adversary)

    def views(self, batch: Any) -> tuple[Any, Any]:
        """The two views of a batch, each an input of the encoder."""
        if isinstance(batch, Mapping) and {"first", "second"} <= set(batch):
            return batch["first"], batch["second"]
        if is_pair(batch):
            return batch[0], batch[1]
        raise ValueError(
            f"Contrastive: batch is {describe(batch)}, but must be a mapping with the keys 'first' and 'second' or a "
            "pair of two views of the instances"
        )

    def encode(self, model: nn.Module, view: Any) -> Tensor:
        """Embeddings of one view, shape (N, H)."""
        outputs = call(model, view) if self.predict is None else self.predict(model, view)
        hidden = tensor_of(outputs, "last_hidden_state", "Contrastive")
        return hidden if hidden.dim() == 2 else self._pooled(hidden, view)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Embeddings of both views at the current weights, shape (2, N, H)."""
        first, second = self.views(batch)
        return _stacked(self.encode(model, first), self.encode(model, second))

    @property
    def has_unperturbed_part(self) -> bool:
        return self.adversary == "second"

    def unperturbed(self, model: nn.Module, batch: Any) -> Tensor | None:
        """Embeddings of the first view, (N, H), if the adversary sees only the second."""
        return self.encode(model, self.views(batch)[0]) if self.adversary == "second" else None

    def complete(self, model: nn.Module, batch: Any, unperturbed: Tensor) -> Tensor:
        """Embeddings of both views, (2, N, H): those of the first as given, the second at the current weights."""
        return _stacked(unperturbed, self.encode(model, self.views(batch)[1]))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        if outputs.dim() != 3 or outputs.shape[0] != 2:
            raise ValueError(f"Contrastive: embeddings have shape {tuple(outputs.shape)}, but must have (2, N, H)")
        n = outputs.shape[1]
        if n < 2:
            raise ValueError(
                "Contrastive: the batch has 1 instance and so no negatives, and its loss is always 0; use batches of "
                "2 or more (drop_last=True in the data loader), and no methods that split the batch"
            )
        rows = F.normalize(at_least_float32(outputs), dim=-1).flatten(0, 1)
        device = rows.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            scores = rows @ rows.T / self.temperature
        itself = torch.eye(2 * n, dtype=torch.bool, device=rows.device)
        positives = torch.arange(2 * n, device=rows.device).roll(n)
        anchors = F.cross_entropy(scores.masked_fill(itself, -torch.inf), positives, reduction="none")
        return anchors.view(2, n).mean(0)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        # Half the squared distance of the unit vectors is the same, and exactly zero for equal ones.
        difference = F.normalize(at_least_float32(first), dim=-1) - F.normalize(at_least_float32(second), dim=-1)
        return 0.5 * difference.square().sum(-1).mean(0)

    def _pooled(self, hidden: Tensor, view: Any) -> Tensor:
        if hidden.dim() != 3:
            raise ValueError(
                f"Contrastive: the encoder returned shape {tuple(hidden.shape)}, but must return (N, T, H) or (N, H)"
            )
        if self.pooling == "mean-all":
            return hidden.mean(1)
        if self.pooling == "cls":
            return hidden[:, 0]
        if not isinstance(view, Mapping) or "attention_mask" not in view:
            raise ValueError(
                f"Contrastive(pooling='mean') needs 'attention_mask', but the view is {describe(view)}; add the mask, "
                "or use pooling='mean-all' if there is no padding"
            )
        mask: Tensor = view["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    if first.shape != second.shape:
        raise ValueError(
            f"Contrastive: the first view has embeddings of shape {tuple(first.shape)}, the second "
            f"{tuple(second.shape)}; both views must contain the same instances"
        )
    return torch.stack((first, second))
