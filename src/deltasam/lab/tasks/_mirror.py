"""Mirror-BERT: self-supervised sentence embeddings, evaluated on semantic textual similarity."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deltasam.lab.tasks._base import Collator, Item, Task, evaluating
from deltasam.lab.tasks._checks import check_columns, check_texts
from deltasam.lab.tasks._data import Data, DataError, Row, Split
from deltasam.lab.tasks._encoding import encoded, padded
from deltasam.lab.tasks._models import load_model, without_pooler
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._sts import STS_SETS, embed_unique, read_sts, sts_scores
from deltasam.lab.tasks._tables import Table, whole
from deltasam.objectives import Contrastive, Objective
from deltasam.step.checks import check_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_SENTENCES = 10_000


@dataclass(frozen=True, kw_only=True)
class MirrorTask(Table, Task):
    r"""Pulls two views of a sentence together with NT-Xent. The second view has a masked span.

    The training split is a corpus of sentences. ``stsb_train_sents_10k`` is that of Mirror-BERT; it is not on the hub,
    from where as many sentences are sampled from STS-B's training set, with a fixed seed. The evaluation split is
    ``test`` (STS12-16, STS-B and SICK-R) or ``validation`` (STS-B's development set, for tuning). The loss on these
    splits, for analyses, is that of two views of the first sentence of each pair.

    The masked span depends on the seed of the run and the index of the sentence. It is the same in every epoch, and
    after an interruption.

    Attributes:
        pooling: ``"mean-all"`` averages all positions including padding, as the original does for BERT; ``"mean"``
            excludes padding; ``"cls"`` is the original's choice for RoBERTa.
        temperature: :math:`\tau` of NT-Xent.
        adversary: The view that sees perturbed weights.
        span: Number of masked characters in the second view.
        mask: The replacement of the span. The original uses ``[MASK]`` for RoBERTa, too.
        shortest: Sentences with fewer characters are not masked. Must be greater than ``span``.
        eval_max_length: Longest sentence in tokens in the evaluation.
        pad_to_max_length: Pad to ``max_length`` as the original does. With ``mean-all`` this changes the embeddings.
        text: The column of the sentence in the corpus.
    """

    metrics: tuple[str, ...] = ("sts_average", *STS_SETS)
    max_length: int = 50
    dataset: str = "mirror_wiki"
    train_split: str = "stsb_train_sents_10k"
    eval_split: str = "test"
    pooling: Literal["mean-all", "mean", "cls"] = "mean-all"
    temperature: float = 0.04
    adversary: Literal["second", "both"] = "second"
    span: int = 5
    mask: str = "[MASK]"
    shortest: int = 30
    eval_max_length: int = 64
    pad_to_max_length: bool = True
    text: str = "sentence"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("task.span", self.span, 0, whole=True)
        if self.span and self.shortest <= self.span:
            raise ValueError(
                f"task.shortest={self.shortest} must be greater than task.span={self.span}, or the whole sentence "
                "could be masked"
            )

    @property
    def reported(self) -> tuple[str, ...]:
        """The seven sets and their mean."""
        return ("sts_average", *STS_SETS)

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return "sentences of STS-B; STS12-16, STS-B, SICK-R"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the corpus, the pairs of the evaluation, or a part of them. ``test`` has no parts."""
        if whole(split) not in (split, "test"):
            return super().read(source, split)
        if split == whole(self.train_split):
            if self.files or source.folder is not None:
                return super().read(source, split)
            pairs = source.split("stsb", ("train",), "nyu-mll/glue:stsb")
            sentences = [row[column] for row in pairs.rows for column in ("sentence1", "sentence2")]
            drawn = random.Random(0).sample(sentences, min(_HUB_SENTENCES, len(sentences)))
            return Split([{self.text: sentence} for sentence in drawn], f"{pairs.origin}, {len(drawn)} sentences")
        if split not in ("test", "validation"):
            raise DataError(f"mirror: there is no split {split!r}; evaluate on test (7 sets) or validation (STS-B)")
        return read_sts(source, list(STS_SETS) if split == "test" else ["stsb"], split)

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Checks the corpus and the primary metric. The pairs were checked when they were read."""
        corpus = splits.get(self.train_split, [])
        origin = origins.get(self.train_split, self.train_split)
        check_columns(corpus, (self.text,), origin)
        check_texts(corpus, (self.text,), origin, allow_empty=not self.own)
        sets = dict.fromkeys(row["set"] for row in splits.get(self.eval_split, []) if "set" in row)
        # Evaluation alone works on any sets.
        if self.train_split in splits and sets and self.primary not in ("sts_average", *sets):
            raise DataError(
                f"task.metrics: {self.primary!r} is not measured on {self.eval_split}, which has pairs of "
                f"{', '.join(sets)}; put one of these first, or sts_average"
            )
        return Data(splits, origins)

    def model(self, path: str, data: Data, **options: Any) -> Any:
        """Returns the encoder without its pooling layer."""
        from transformers import AutoModel

        return without_pooler(load_model(AutoModel, path, **options))

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns two views of each sentence; for a pair of the evaluation, those of its first sentence."""
        plain = [row[self.text] if self.text in row else row["sentence1"] for row in rows]
        masked = [self.masked(text, random.Random(f"{seed}/{index}")) for index, text in enumerate(plain)]
        first, second = (encoded(tokenizer, [texts], self.max_length) for texts in (plain, masked))
        return [{"first": one, "second": other} for one, other in zip(first, second, strict=True)]

    def masked(self, text: str, draw: random.Random) -> str:
        """Returns the second view: a span of characters is replaced, as in the original at its first occurrence."""
        if len(text) < self.shortest or self.span == 0:
            return text
        start = draw.randrange(len(text) - self.span)
        left, right = text.split(text[start : start + self.span], 1)
        return f"{left} {self.mask} {right}"

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns a function that pads each view."""

        def collate(items: list[Item]) -> dict[str, Any]:
            views = ([item[view] for item in items] for view in ("first", "second"))
            first, second = (self._padded(tokenizer, view, self.max_length) for view in views)
            return {"first": first, "second": second}

        return collate

    def objective(self) -> Objective:
        """Returns NT-Xent."""
        return Contrastive(temperature=self.temperature, pooling=self.pooling, adversary=self.adversary)

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """Returns the Spearman correlation of every set, and their mean."""
        pooled = Contrastive(pooling=self.pooling)
        with evaluating(model) as device:

            def embed(texts: list[str]) -> Tensor:
                view = self._padded(tokenizer, encoded(tokenizer, [texts], self.eval_max_length), self.eval_max_length)
                return pooled.encode(model, {name: value.to(device) for name, value in view.items()}).float().cpu()

            sentences = [row[column] for row in rows for column in ("sentence1", "sentence2")]
            vectors = embed_unique(sentences, embed, batch_size)
        first, second = (torch.stack([vectors[row[c]] for row in rows]) for c in ("sentence1", "sentence2"))
        return sts_scores(first, second, rows)

    def _padded(self, tokenizer: PreTrainedTokenizerBase, items: list[Item], length: int) -> dict[str, Tensor]:
        return padded(items, tokenizer, length if self.pad_to_max_length else None)
