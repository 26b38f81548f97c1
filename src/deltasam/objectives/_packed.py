"""Causal language models on packed batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.objectives._causal import CausalLM
from deltasam.objectives._tokens import Tokens
from deltasam.objectives.packing import LENGTHS, document_index, is_packed


@dataclass(frozen=True, kw_only=True)
class PackedCausalLM(CausalLM):
    r"""Cross-entropy of the next token where several documents share a row: an instance is a document.

    The positions of a packed row restart at 0 where a document begins (``position_ids``, and no ``attention_mask``),
    as padding-free collators make them: TRL's, and transformers' ``DataCollatorWithFlattening``. The loss of document
    i is :math:`l_i = D \sum_t \mathrm{nll}_{it} / \sum_i T_i` with the number D of documents, or the mean over its
    :math:`T_i` targets with ``reduction="sequence"``. The first token of a document is never a target. Documents of
    one token have no target and are not counted. Without ``position_ids`` this is :class:`CausalLM`.

    The model sees the pack as it is and must keep documents apart: transformers does so from ``position_ids``. Methods
    that perturb instances, or take them out of a batch, need one row per document:
    :func:`~deltasam.objectives.packing.unpacked` makes such a batch.

    The arguments are those of :class:`CausalLM`.

    Example:
        >>> model = torch.nn.Embedding(9, 9)
        >>> pack = {"input_ids": torch.tensor([[5, 6, 7, 8, 4]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
        >>> objective = PackedCausalLM(labels="input_ids", predict=lambda model, x: model(x["input_ids"]))
        >>> objective(model, pack).shape, objective.items(pack)
        (torch.Size([2]), tensor(3))
    """

    def targets(self, batch: Any) -> Tensor:
        if not is_packed(batch):
            return super().targets(batch)
        # Before the shift: the label of the first token of a document would be predicted from another document.
        first = batch["position_ids"] == 0
        return self._shifted(Tokens.targets(self, batch).masked_fill(first, self.ignore_index))

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        found = super().inputs(model, batch)
        return {name: value for name, value in found.items() if name != LENGTHS} if is_packed(batch) else found

    def items(self, batch: Any) -> Tensor | None:
        """As :meth:`Tokens.items`; the number of documents if every document counts the same."""
        if self.reduction == "token" or not is_packed(batch):
            return super().items(batch)
        positions = batch["position_ids"]
        found: Tensor = positions.new_full((), _documents(batch, document_index(positions).flatten()))
        return found

    def reduced(self, values: Tensor, labels: Tensor, batch: Any) -> Tensor:
        if not is_packed(batch):
            return super().reduced(values, labels, batch)
        index = document_index(batch["position_ids"]).to(values.device).flatten()
        number = _documents(batch, index)
        own = index == torch.arange(number, device=index.device).unsqueeze(1)  # (D, R L); an index_add is not exact
        counts = (own & (labels.flatten() != self.ignore_index)).sum(1)
        sums = values.flatten().where(own, values.new_zeros(())).sum(1)
        if self.reduction == "sequence":
            return sums / counts.clamp(min=1)
        return sums * (number / counts.sum().clamp(min=1).to(values.dtype))


def _documents(batch: Mapping[str, Any], index: Tensor) -> int:
    """The number of documents; without the column of their lengths it has to be read from the device."""
    return int(batch[LENGTHS].shape[0]) if LENGTHS in batch else int(index[-1]) + 1
