"""Summarization and other tasks that generate a text, by beam search, evaluated with ROUGE."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from deltasam.lab.tasks._base import Collator, Item, Task, batches, evaluating
from deltasam.lab.tasks._checks import check_columns, check_texts
from deltasam.lab.tasks._data import Data, Row
from deltasam.lab.tasks._encoding import encoded, padded
from deltasam.lab.tasks._metrics import rouge
from deltasam.lab.tasks._models import load_model
from deltasam.lab.tasks._tables import Table
from deltasam.objectives import Objective, Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_IGNORED = -100
_INPUTS = ("input_ids", "attention_mask")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqTask(Table, Task):
    """Generates a target text from a source text.

    Attributes:
        source: The column of the source text.
        target: The column of the target text.
        prefix: Prepended to every source text (T5: ``"summarize: "``).
        max_length: Longest source in tokens.
        max_target_length: Longest target in tokens, in training and generation.
        min_target_length: Shortest generated text in tokens.
        beams: Number of beams.
        length_penalty: Exponent of the length by which the scores of beams are divided.
        no_repeat_ngram_size: n-grams of this size are generated only once; 0 for no limit.
        label_smoothing: Probability that is spread over the vocabulary.
        reduction: ``"token"``: every token of a batch has the same weight, as in Hugging Face. ``"sequence"``: every
            text has.
    """

    metrics: tuple[str, ...] = ("rouge1", "rouge2", "rougeLsum")
    max_length: int = 1024
    source: str = "source"
    target: str = "target"
    prefix: str = ""
    max_target_length: int = 142
    min_target_length: int = 0
    beams: int = 4
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    label_smoothing: float = 0.1
    reduction: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_target_length <= self.max_target_length:
            raise ValueError(
                f"task.min_target_length={self.min_target_length} must be between 0 and "
                f"task.max_target_length={self.max_target_length}"
            )

    @property
    def reported(self) -> tuple[str, ...]:
        """Three ROUGE scores and the mean length in words."""
        return ("rouge1", "rouge2", "rougeLsum", "words")

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Returns rows with the two columns."""
        columns = (self.source, self.target)
        checked = {}
        for split, rows in splits.items():
            origin = origins.get(split, split)
            check_columns(rows, columns, origin)
            check_texts(rows, (self.source,), origin, allow_empty=not self.own)
            check_texts(rows, (self.target,), origin)
            if self.own and not _is_read_by_rouge(row[self.target] for row in rows[:1000]):
                _log.warning(
                    "%s: ROUGE ignores characters except a-z and 0-9, and most of column %r is in another script; its "
                    "values are meaningless for these texts, use another metric", origin, self.target,
                )  # fmt: skip
            checked[split] = [{column: row[column] for column in columns} for row in rows]
        return Data(checked, origins)

    def model(self, path: str, data: Data, **options: Any) -> Any:
        """Returns the model with its language modelling head."""
        from transformers import AutoModelForSeq2SeqLM

        return load_model(AutoModelForSeq2SeqLM, path, **options)

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns the token ids of source and target. The seed is not used."""
        sources = encoded(tokenizer, [[self.prefix + row[self.source] for row in rows]], self.max_length)
        targets = tokenizer(
            text_target=[row[self.target] for row in rows], truncation=True, max_length=self.max_target_length
        )
        return [
            {**{name: source[name] for name in _INPUTS}, "labels": target}
            for source, target in zip(sources, targets["input_ids"], strict=True)
        ]

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns a function that pads the sources, and the targets with ignored labels."""

        def collate(items: list[Item]) -> dict[str, Any]:
            inputs = padded([{name: item[name] for name in _INPUTS} for item in items], tokenizer)
            # Targets are padded on the right, even if the tokenizer pads sources on the left.
            labels = [torch.tensor(item["labels"]) for item in items]
            return {
                **inputs,
                "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
            }

        return collate

    def objective(self) -> Objective:
        """Returns the cross-entropy of the target tokens."""
        return Seq2Seq(label_smoothing=self.label_smoothing, reduction=self.reduction)

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """Returns ROUGE of the generated texts, and their mean length in words."""
        written = self.generate(model, tokenizer, rows, batch_size=batch_size)
        references = [by_sentence(row[self.target]) for row in rows]
        words = sum(len(text.split()) for text in written) / len(written)
        return {**rouge([by_sentence(text) for text in written], references), "words": words}

    def generate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> list[str]:
        """Returns the texts from beam search, in the order of the rows."""
        options = {
            "num_beams": self.beams,
            "length_penalty": self.length_penalty,
            "min_length": self.min_target_length,
            "max_length": self.max_target_length,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "early_stopping": self.beams > 1,
        }
        order = sorted(range(len(rows)), key=lambda index: len(rows[index][self.source]))
        found: dict[int, str] = {}
        with evaluating(model) as device:
            for chunk in batches(order, batch_size):
                texts = [self.prefix + rows[index][self.source] for index in chunk]
                inputs = padded(encoded(tokenizer, [texts], self.max_length), tokenizer)
                kept = {name: inputs[name].to(device) for name in _INPUTS}
                made = model.generate(**kept, **options)
                found |= dict(zip(chunk, tokenizer.batch_decode(made, skip_special_tokens=True), strict=True))
        return [found[index] for index in range(len(rows))]


def _is_read_by_rouge(texts: Iterable[str]) -> bool:
    """Returns whether rouge-score keeps at least half of the letters."""
    letters = Counter(sign.isascii() for text in texts for sign in text if sign.isalpha())
    return letters[True] >= letters[False]


def by_sentence(text: str) -> str:
    r"""Returns the text with one sentence per line, as ROUGE-Lsum expects it. Keeps existing line breaks.

    Example:
        >>> by_sentence("It rained. We stayed.\nThen it stopped .")
        'It rained.\nWe stayed.\nThen it stopped .'
    """
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(sentence for line in lines for sentence in _SENTENCE_END.split(line) if sentence)


CNN_DAILYMAIL = Seq2SeqTask(
    name="cnn_dailymail",
    dataset="cnn_dailymail",
    hub="abisee/cnn_dailymail:3.0.0",
    source="article",
    target="highlights",
    # The settings of BART's published summaries.
    min_target_length=56,
    length_penalty=2.0,
    no_repeat_ngram_size=3,
)
