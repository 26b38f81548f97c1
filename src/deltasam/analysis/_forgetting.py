"""What a fine-tuned language model has forgotten: its log loss on general text, before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.analysis._common import batches_of, in_mode
from deltasam.objectives import CausalLM


def token_nll(
    model: nn.Module, data: Iterable[Any], *, limit: int | None = None, progress: bool | None = None
) -> float:
    r"""Returns the mean negative log-probability of a token given those before it, in nats, in eval mode.

    .. math:: -\frac{1}{\sum_i T_i} \sum_i \sum_t \log p(x_{it} \mid x_{i,<t})

    Its exponential is the perplexity. Every token of the data has the same weight, whatever the batches are.

    Args:
        model: A causal language model.
        data: Batches with ``input_ids`` and, if they are padded, ``attention_mask``. Where there are ``labels``, as
            in training, only tokens whose label is not -100 count.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Example:
        >>> uniform = nn.Embedding(8, 8)
        >>> _ = nn.init.zeros_(uniform.weight)
        >>> batches = [{"input": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}]
        >>> round(token_nll(uniform, batches), 4) == round(torch.tensor(8.0).log().item(), 4)
        True
    """
    objective = CausalLM()
    total, count = 0.0, 0
    with in_mode(model, False), torch.no_grad():
        for batch in batches_of(model, data, limit, progress, "token nll"):
            labelled = batch if "labels" in batch else _labelled(batch)
            tokens = int(objective.items(labelled) or 0)
            if tokens:  # the losses of a batch without targets are not defined
                total += float(objective(model, labelled).double().mean()) * tokens
                count += tokens
    if not count:
        raise ValueError(
            "data has no token to predict: every text needs at least two tokens, or labels that are not -100"
        )
    return total / count


def _labelled(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Adds every token as a label. Padding on the left is moved to the right.

    On the left the first token of a text would be predicted from padding, and GPT-2 would count that in its positions.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return {**batch, "labels": batch["input_ids"]}
    order = (mask == 0).long().argsort(dim=1, stable=True)
    rows = {
        name: value.gather(1, order) if isinstance(value, Tensor) and value.shape == mask.shape else value
        for name, value in batch.items()
    }
    return {**rows, "labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)}


@dataclass(frozen=True)
class Forgetting:
    """Log loss per token on general text; ``float(forgetting)`` is its rise.

    Attributes:
        before: Before fine-tuning.
        after: After fine-tuning.
    """

    before: float
    after: float

    @property
    def rise(self) -> float:
        """``after - before``: positive if something was forgotten."""
        return self.after - self.before

    def __float__(self) -> float:
        return self.rise


def forgetting(
    model: nn.Module,
    data: Iterable[Any],
    *,
    before: nn.Module | float | None = None,
    limit: int | None = None,
    progress: bool | None = None,
) -> Forgetting:
    """Returns the log loss per token on held-out general text before and after fine-tuning, see :func:`token_nll`.

    Args:
        model: The fine-tuned model.
        data: Batches of general text. They are read twice, so a generator will not do.
        before: The model before fine-tuning, or its log loss on the same data. By default the model itself with its
            adapters disabled (PEFT), which costs no second model.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Raises:
        ValueError: There is neither ``before`` nor an adapter to disable.

    Example:
        >>> tuned, pretrained = nn.Embedding(8, 8), nn.Embedding(8, 8)
        >>> data = [{"input": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}]
        >>> found = forgetting(tuned, data, before=pretrained)
        >>> found.after == token_nll(tuned, data), float(found) == found.after - found.before
        (True, True)
    """
    if isinstance(before, nn.Module):
        first = token_nll(before, data, limit=limit, progress=progress)
    elif before is not None:
        first = float(before)
    else:
        disable: Any = getattr(model, "disable_adapter", None)
        if disable is None:
            raise ValueError(
                f"{type(model).__name__} has no adapters that could be disabled; pass before=, the model before "
                "fine-tuning or its token_nll"
            )
        with ExitStack() as stack:
            stack.enter_context(disable())
            first = token_nll(model, data, limit=limit, progress=progress)
    return Forgetting(first, token_nll(model, data, limit=limit, progress=progress))
