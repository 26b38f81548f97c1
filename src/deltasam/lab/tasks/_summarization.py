"""Summaries, translations, answers: one text becomes another, by beam search, scored by ROUGE."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from deltasam.lab.tasks._base import Collator, Data, Item, Task, batches, evaluating
from deltasam.lab.tasks._checks import check_columns, check_texts
from deltasam.lab.tasks._encoding import encoded, padded
from deltasam.lab.tasks._files import Row
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
    """From a source text to a target text. The lengths of CNN/DailyMail's summaries are those of its task alone.

    Attributes:
        source: Column of the source text.
        target: Column of the target text.
        prefix: Put before every source text (T5: ``"summarize: "``).
        max_length: Longest source in tokens.
        max_target_length: Longest target in tokens, in training and generation.
        min_target_length: Shortest generated text in tokens.
        beams: Width of the beam search.
        length_penalty: Exponent of the length that scores of beams are divided by.
        no_repeat_ngram_size: n-grams of this size are generated only once; 0 for no such rule.
        label_smoothing: Share of the probability spread over the vocabulary.
        reduction: Whether every token of a batch counts the same (``"token"``, Hugging Face's), or every text.
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
        """Checks the options."""
        super().__post_init__()
        if not 0 <= self.min_target_length <= self.max_target_length:
            raise ValueError(
                f"task.min_target_length={self.min_target_length} must be in 0..{self.max_target_length}, the "
                "max_target_length"
            )

    @property
    def reported(self) -> tuple[str, ...]:
        """The three ROUGEs, and the length in words."""
        return ("rouge1", "rouge2", "rougeLsum", "words")

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Rows with the two columns, none of them empty."""
        columns = (self.source, self.target)
        checked = {}
        for split, rows in splits.items():
            origin = origins.get(split, split)
            check_columns(rows, columns, origin)
            check_texts(rows, (self.source,), origin, allow_empty=not self.own)
            check_texts(rows, (self.target,), origin)
            if self.own and not _is_read_by_rouge(row[self.target] for row in rows[:1000]):
                _log.warning(
                    "%s: ROUGE reads words of a-z and 0-9 alone, and most of column %r is in another script: its "
                    "values say nothing of these texts, take a measure of your own", origin, self.target,
                )  # fmt: skip
            checked[split] = [{column: row[column] for column in columns} for row in rows]
        return Data(checked, origins)

    def model(self, path: str, data: Data, **options: Any) -> Any:
        """The model with its language modelling head."""
        from transformers import AutoModelForSeq2SeqLM

        return load_model(AutoModelForSeq2SeqLM, path, **options)

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Token ids of source and target; nothing is drawn."""
        sources = encoded(tokenizer, [[self.prefix + row[self.source] for row in rows]], self.max_length)
        targets = tokenizer(
            text_target=[row[self.target] for row in rows], truncation=True, max_length=self.max_target_length
        )
        return [
            {**{name: source[name] for name in _INPUTS}, "labels": target}
            for source, target in zip(sources, targets["input_ids"], strict=True)
        ]

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Pads the sources, and the targets by labels that do not count."""

        def collate(items: list[Item]) -> dict[str, Any]:
            inputs = padded([{name: item[name] for name in _INPUTS} for item in items], tokenizer)
            # Targets have a length of their own, and stand on the left whatever side the sources are padded on.
            labels = [torch.tensor(item["labels"]) for item in items]
            return {
                **inputs,
                "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED),
            }

        return collate

    def objective(self) -> Objective:
        """Cross-entropy of the target's tokens."""
        return Seq2Seq(label_smoothing=self.label_smoothing, reduction=self.reduction)

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """ROUGE of the generated texts, and their mean length in words."""
        written = self.generate(model, tokenizer, rows, batch_size=batch_size)
        references = [by_sentence(row[self.target]) for row in rows]
        words = sum(len(text.split()) for text in written) / len(written)
        return {**rouge([by_sentence(text) for text in written], references), "words": words}

    def generate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> list[str]:
        """The texts that beam search finds, in the order of the rows."""
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
    """Whether at least half of the letters are those that the package rouge-score keeps."""
    letters = Counter(sign.isascii() for text in texts for sign in text if sign.isalpha())
    return letters[True] >= letters[False]


def by_sentence(text: str) -> str:
    r"""One sentence per line, as summary-level ROUGE-L wants it; line breaks that are there stay.

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
    # How BART's published summaries were generated.
    min_target_length=56,
    length_penalty=2.0,
    no_repeat_ngram_size=3,
)
