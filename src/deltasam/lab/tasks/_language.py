"""What all tasks for causal language models share: batches, the objective, and what is measured once at the end."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deltasam.lab.tasks._base import Collator, Item, Task, batches
from deltasam.lab.tasks._data import Data
from deltasam.lab.tasks._general_text import general_texts
from deltasam.lab.tasks._measured import Measured, Metrics, Rounding, at_few_bits, check_bits
from deltasam.lab.tasks._models import load_model
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._tables import Table
from deltasam.objectives import CausalLM, Objective
from deltasam.objectives.batch import unwrapped
from deltasam.step.checks import check_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
_GENERAL_BATCH = 8  # the logits of a batch of long texts take the most memory of an evaluation
_GENERAL = "general text"


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Table, Task):
    """A task for a causal language model: texts of which only the answers are learned.

    After training, two things are measured besides the metrics: *forgetting*, the rise of the log loss per token on
    general text, and the primary metric with weights rounded to few bits, after merging the adapters.

    Attributes:
        general: A text file for forgetting. By default Wikipedia from the data folder, or topics of Python's help().
        general_rows: Number of texts for forgetting; 0 does not measure it.
        general_length: Longest of these texts in tokens.
        bits: The primary metric is measured again with weights rounded to these numbers of bits.
        rounding: How they are rounded: ``group``, with one scale for 64 inputs of an output, ``channel``, with one for
            all inputs.
    """

    general: str = ""
    general_rows: int = 200
    general_length: int = 128
    bits: tuple[int, ...] = (8, 4, 3)
    rounding: tuple[Rounding, ...] = field(default=("group",), metadata={"later": (("group",),)})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("task.general_rows", self.general_rows, 0, whole=True)
        check_number("task.general_length", self.general_length, 2, whole=True)
        check_bits(self.bits)

    def load(self, source: DataSource, splits: Sequence[str] | None = None) -> Data:
        """Reads and checks the splits, and reads the general text."""
        return self.load_general(super().load(source, splits), source)

    def load_general(self, data: Data, source: DataSource) -> Data:
        """Returns the data with the general text."""
        if not self.general_rows:
            return data
        texts = general_texts(self.general, source, self.general_rows)
        found = tuple(row["text"] for row in texts.rows)
        return dataclasses.replace(data, general=found, origins={**data.origins, _GENERAL: texts.origin})

    def model(self, path: str, data: Data, **options: Any) -> Any:
        """Returns the model with its language modelling head."""
        from transformers import AutoModelForCausalLM

        return load_model(AutoModelForCausalLM, path, **options)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns a function that pads on the left and keeps the labels of the last positions."""
        return LeftPadded(int(tokenizer.pad_token_id))  # type: ignore[arg-type]

    def objective(self) -> Objective:
        """Returns the cross-entropy of the answers' tokens."""
        return CausalLM(predict=last_logits)

    def initial(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data) -> dict[str, float]:
        """Returns the log loss per token on general text, before training."""
        return {"general_nll_before": self._general(model, tokenizer, data)} if data.general else {}

    def final(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        rows: Sequence[dict[str, Any]],
        *,
        before: Mapping[str, float],
        batch_size: int = 32,
    ) -> Measured:
        """Returns forgetting, and the primary metric with rounded weights."""

        def again() -> Metrics:
            return {self.primary: self.evaluate(model, tokenizer, rows, batch_size=batch_size)[self.primary]}

        rounded = Measured(dict(at_few_bits(model, self.bits, self.rounding, again)))
        return Measured(self.forgotten(model, tokenizer, data, before)) | rounded

    def forgotten(self, model: Any, tokenizer: Any, data: Data, before: Mapping[str, float]) -> Metrics:
        """Returns the log loss on general text after and before training, and its rise."""
        if not data.general:
            return {}
        found = {"general_nll": self._general(model, tokenizer, data)}
        if "general_nll_before" in before:
            found["general_nll_before"] = before["general_nll_before"]
        elif hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                found["general_nll_before"] = self._general(model, tokenizer, data)
        if "general_nll_before" in found:
            found["forgetting"] = found["general_nll"] - found["general_nll_before"]
        return found

    def _general(self, model: Any, tokenizer: Any, data: Data) -> float:
        from deltasam.analysis import token_nll

        made = tokenizer(sorted(data.general, key=len), truncation=True, max_length=self.general_length)["input_ids"]
        texts = [torch.tensor(ids) for ids in made if len(ids) > 1]
        data_of = []
        for chunk in batches(texts, _GENERAL_BATCH):
            ids = nn.utils.rnn.pad_sequence(chunk, batch_first=True, padding_value=tokenizer.pad_token_id)
            lengths = torch.tensor([len(text) for text in chunk])
            data_of.append(
                {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
            )
        return token_nll(model, data_of, progress=False)


@dataclass(frozen=True)
class LeftPadded:
    """Joins items into a batch, padded on the left, so that all answers end at the last position.

    The labels are cut to the last positions, back to the first target of the batch. :func:`last_logits` computes the
    logits of these positions only: for a prompt with an answer of one word and a vocabulary of 50,000 that saves a
    fifth of a small model's time, and most of its memory.

    Attributes:
        pad: The padding token.
        multiple: The length is rounded up to a multiple of it, so that few shapes occur.

    Example:
        >>> items = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
        >>> batch = LeftPadded(0)(items)
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7], [0, 8, 9]], [[-100, 7], [-100, 9]])
    """

    pad: int
    multiple: int = 1

    def __call__(self, items: list[Item]) -> dict[str, Any]:
        """Returns ``input_ids`` and ``attention_mask``, (N, T), and ``labels``, (N, K) for the last K positions."""
        longest = max(len(item["input_ids"]) for item in items)
        longest = -(-longest // self.multiple) * self.multiple
        kept = 1 + max(len(item["labels"]) - _first_target(item["labels"]) for item in items)
        kept = min(longest, -(-kept // self.multiple) * self.multiple)

        def table(column: str, fill: int) -> Tensor:
            return torch.tensor([[fill] * (longest - len(item[column])) + list(item[column]) for item in items])

        masks = [[0] * (longest - len(item["input_ids"])) + [1] * len(item["input_ids"]) for item in items]
        return {
            "input_ids": table("input_ids", self.pad),
            "attention_mask": torch.tensor(masks),
            "labels": table("labels", IGNORED)[:, -kept:],
        }

    def to_multiple(self, multiple: int) -> LeftPadded:
        """Returns the same collator with another multiple."""
        return dataclasses.replace(self, multiple=multiple)


def _first_target(labels: Sequence[int]) -> int:
    return next((index for index, label in enumerate(labels) if label != IGNORED), len(labels))


def positions(mask: Tensor) -> Tensor:
    """Returns the positions of tokens that are padded on the left, from 0; models count the padding otherwise."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def last_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the logits (N, K, V) of the positions that have labels in a batch of :class:`LeftPadded`."""
    kept = batch["labels"].shape[1]
    inner = unwrapped(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    takes = inspect.signature(inner.forward).parameters
    options: dict[str, Any] = {"use_cache": False}
    if "position_ids" in takes:
        options["position_ids"] = positions(batch["attention_mask"])
    if "logits_to_keep" in takes:
        options["logits_to_keep"] = kept
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    logits: Tensor = outputs.logits[:, -kept:]
    return logits


def starts_with(tokenizer: Any) -> list[int]:
    """Returns the token that the tokenizer puts in front of every text, or nothing. Tokens at the end do not count."""
    special = tokenizer("")["input_ids"]
    return special[:1] if special and special[0] in (tokenizer.bos_token_id, tokenizer.cls_token_id) else []


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of texts without special tokens."""
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return found
