"""Classification and regression of texts or pairs of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deltasam.lab.tasks._base import Collator, Item, Task, batches, evaluating
from deltasam.lab.tasks._checks import check_columns, check_texts, class_labels, infer_classes, scores
from deltasam.lab.tasks._data import Data, DataError, OtherSet, Row
from deltasam.lab.tasks._encoding import encoded, once, padded
from deltasam.lab.tasks._measured import Measured, Metrics, Rounding, at_few_bits, check_bits, quality_of_run
from deltasam.lab.tasks._metrics import LOWER_IS_BETTER, METRICS, OF_NUMBERS
from deltasam.lab.tasks._models import find_model, load_model, without_pooler
from deltasam.lab.tasks._other_sets import class_groups, other_logits, read_other
from deltasam.lab.tasks._siamese import CosineClassifier
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._stress import balanced, sampled, with_wrong_labels
from deltasam.lab.tasks._tables import Table
from deltasam.objectives import Classification, Objective, Regression
from deltasam.step.checks import check_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class SentenceTask(Table, Task):
    """One label for a text or a pair of texts: the GLUE tasks, and the user's data in that form.

    Attributes:
        kind: Classification or regression.
        text: The column of the text, or the two columns of a pair.
        label: The column of the label: the number or the name of a class, or a number for regression.
        classes: Names of the classes, in the order of their numbers. Inferred from the training split if empty.
        pad_to_max_length: Pad every batch to ``max_length`` instead of its longest text, as R-Drop's scripts do.
        pairing: ``"joint"``: the model reads both texts of a pair together. ``"siamese"``: it encodes them separately
            and compares them by their cosine; for sentence encoders and two classes.
        rows: Train on a sample of so many rows, equally many of each class, drawn by the seed of the run.
        label_noise: Share of the training labels of each class to replace by other classes, by the seed of the run.
        evaluate_on: Other sets to evaluate on after training: tasks (``qqp``, ``mnli:validation_mismatched``), or
            files with the same columns and classes. The metrics get a suffix, ``accuracy_on_qqp``.
        bits: The metrics are measured again with weights rounded to these numbers of bits, ``accuracy_4bit``.
        rounding: How they are rounded: ``group``, with one scale for 64 inputs of an output, and ``channel``, with one
            for all inputs, ``accuracy_4bit_channel``.

    Example:
        >>> task = SentenceTask(name="own", text=("review",), label="stars", metrics=("accuracy",))
        >>> rows = [{"review": "fine", "stars": "good"}, {"review": "dull", "stars": "bad"}]
        >>> task.check({"train": rows}, {}).classes
        ('bad', 'good')
    """

    kind: Literal["classification", "regression"] = "classification"
    text: tuple[str, ...] = ("text",)
    label: str = "label"
    classes: tuple[str, ...] = ()
    pad_to_max_length: bool = False
    pairing: Literal["joint", "siamese"] = "joint"
    rows: int | None = field(default=None, metadata={"later": (None,)})
    label_noise: float = field(default=0.0, metadata={"later": (0.0,)})
    evaluate_on: tuple[str, ...] = field(default=(), metadata={"later": ((),)})
    bits: tuple[int, ...] = field(default=(8, 4, 3), metadata={"later": ((8, 4, 3),)})
    rounding: tuple[Rounding, ...] = field(default=("group", "channel"), metadata={"later": (("group", "channel"),)})

    def __post_init__(self) -> None:
        if not self.metrics:
            fitting = ("accuracy", "f1") if self.kind == "classification" else OF_NUMBERS
            object.__setattr__(self, "metrics", fitting)
        super().__post_init__()
        if not 1 <= len(self.text) <= 2:
            raise ValueError(f"task.text={list(self.text)} must name one column, or two for pairs")
        if self.label in self.text:
            raise ValueError(f"task.text={list(self.text)} must not contain the label, task.label={self.label!r}")
        if "label" in self.text:  # the key of the label in checked rows
            raise ValueError(f"task.text={list(self.text)}: a text column cannot be called 'label'; rename it")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"task.classes={list(self.classes)} must not contain duplicates")
        if self.pairing == "siamese" and (len(self.text) != 2 or self.kind != "classification"):
            raise ValueError("task.pairing=siamese needs two columns in task.text and task.kind=classification")
        check_number("task.label_noise", self.label_noise, 0, 1)
        if self.label_noise and self.kind != "classification":
            raise ValueError(f"task.label_noise={self.label_noise} needs classes, task.kind=classification")
        if self.rows is not None:
            check_number("task.rows", self.rows, 1, whole=True)
        check_bits(self.bits)

    @property
    def reported(self) -> tuple[str, ...]:
        """All metrics of classes and numbers; of a regression those of numbers."""
        return tuple(METRICS) if self.kind == "classification" else OF_NUMBERS

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the primary metric is better."""
        return self.primary not in LOWER_IS_BETTER

    def load(self, source: DataSource, splits: Sequence[str] | None = None) -> Data:
        """Reads and checks the splits, and the other sets to evaluate on."""
        data = super().load(source, splits)
        others = {name: read_other(self, name, source, data.classes) for name in self.evaluate_on}
        for other in others.values():
            if self.kind == "classification":
                class_groups(data.classes, other.classes)  # raises an error if they do not fit
        return dataclasses.replace(data, others=others)

    def stressed(self, data: Data, seed: int) -> Data:
        """Returns the data with few training rows and wrong labels, if the task asks for them."""
        rows = data.splits[self.train_split]
        if self.rows is not None:
            rows = (balanced if self.kind == "classification" else sampled)(rows, self.rows, seed)
        if self.label_noise:
            # Of ratings 1 to 5 there is no class 0: no label must become one.
            there = sorted({row["label"] for row in data.splits[self.train_split]})
            classes = there if len(there) > 1 else range(len(data.classes))
            rows = with_wrong_labels(rows, self.label_noise, classes, seed)
        return dataclasses.replace(data, splits={**data.splits, self.train_split: rows})

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Returns rows with the texts and a ``label``: the number of a class, or a score."""
        for split, rows in splits.items():
            self._check_columns(rows, origins.get(split, split))
        classes = self.classes if self.kind == "classification" else ()
        if self.kind == "classification" and not classes:
            first = self.train_split if self.train_split in splits else next(iter(splits))
            classes = infer_classes(splits[first], self.label, origins.get(first, first))
        checked = {split: self._checked(rows, classes, origins.get(split, split)) for split, rows in splits.items()}
        return Data(checked, origins, classes)

    def check_other(self, rows: list[Row], classes: tuple[str, ...], origin: str) -> list[Row]:
        """Returns the rows of another file in the form of :meth:`check`. Its labels are ``classes``, those trained."""
        self._check_columns(rows, origin)
        return self._checked(rows, classes, origin)

    def _check_columns(self, rows: list[Row], origin: str) -> None:
        check_columns(rows, (*self.text, self.label), origin)
        check_texts(rows, self.text, origin, allow_empty=not self.own)

    def _checked(self, rows: list[Row], classes: tuple[str, ...], origin: str) -> list[Row]:
        if self.kind == "classification":
            labels: list[Any] = class_labels(rows, self.label, classes, origin, inferred=not self.classes)
        else:
            labels = scores(rows, self.label, origin)
        texts = [{column: row[column] for column in self.text} for row in rows]
        return [{**row, "label": label} for row, label in zip(texts, labels, strict=True)]

    def model(self, path: str, data: Data, **options: Any) -> Any:
        """Returns a sequence classifier with one output per class, or one output for regression."""
        from transformers import AutoModel, AutoModelForSequenceClassification

        if self.pairing == "siamese":
            if len(data.classes) != 2:
                raise DataError(f"task.pairing=siamese needs two classes, not {len(data.classes)}")
            classifier = CosineClassifier(without_pooler(load_model(AutoModel, path, **options)))
            classifier.load_head(find_model(path))
            return classifier
        if self.kind == "regression":
            head = {"num_labels": 1, "problem_type": "regression"}
        else:
            names = dict(enumerate(data.classes))
            head = {
                "num_labels": len(names),
                "id2label": names,
                "label2id": {name: index for index, name in names.items()},
                "problem_type": "single_label_classification",
            }
        return load_model(AutoModelForSequenceClassification, path, **head, **options)

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns token ids and labels. The seed is not used."""
        texts = [[row[column] for row in rows] for column in self.text]
        if self.pairing == "siamese":
            first, second = (encoded(tokenizer, [column], self.max_length) for column in texts)
            items = [{"first": one, "second": other} for one, other in zip(first, second, strict=True)]
        else:
            items = encoded(tokenizer, texts, self.max_length)
        return [{**item, "labels": row["label"]} for item, row in zip(items, rows, strict=True)]

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns a function that pads the token ids and stacks the labels."""
        length = self.max_length if self.pad_to_max_length else None
        kept = ("input_ids", "attention_mask")

        def collate(items: list[Item]) -> dict[str, Any]:
            if self.pairing == "joint":
                return padded(items, tokenizer, length)
            first, second = (padded([item[view] for item in items], tokenizer, length) for view in ("first", "second"))
            views = {**{name: first[name] for name in kept}, **{f"second_{name}": second[name] for name in kept}}
            return {**views, "labels": torch.tensor([item["labels"] for item in items])}

        return collate

    def objective(self) -> Objective:
        """Returns cross-entropy, or squared error for regression."""
        return Classification() if self.kind == "classification" else Regression()

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """Returns the metrics and the mean ``loss``."""
        logits, losses = self.outputs(model, tokenizer, rows, batch_size=batch_size)
        return {**self.measure(logits, rows), "loss": float(losses.mean())}

    def outputs(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits (rows, outputs) and the losses (rows,) on the CPU, in eval mode."""
        objective, collate = self.objective(), self.collator(tokenizer)
        items = once(self.encode, rows, tokenizer)
        order = sorted(range(len(items)), key=lambda index: _length(items[index]))  # to save padding
        outputs, losses = [], []
        with evaluating(model) as device:
            for chunk in batches(order, batch_size):
                batch = {name: value.to(device) for name, value in collate([items[i] for i in chunk]).items()}
                logits = objective.forward(model, batch)
                losses.append(objective.losses(logits, batch).double().cpu())
                outputs.append(logits.float().cpu())
        back = torch.tensor(order).argsort()
        return torch.cat(outputs)[back], torch.cat(losses)[back]

    def measure(self, logits: Tensor, rows: Sequence[Row]) -> Metrics:
        """Returns the metrics of these outputs."""
        predictions = logits.argmax(-1) if self.kind == "classification" else logits.squeeze(-1)
        labels = [row["label"] for row in rows]
        options = {"f1": {"classes": logits.shape[-1]}}
        return {name: METRICS[name](predictions.numpy(), labels, **options.get(name, {})) for name in self.metrics}

    def final(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        rows: Sequence[Row],
        *,
        before: Mapping[str, float],
        batch_size: int = 32,
    ) -> Measured:
        """Returns calibration, and the metrics with rounded weights and on other sets."""
        logits, _ = self.outputs(model, tokenizer, rows, batch_size=batch_size)
        found = quality_of_run(logits, self.labels(rows)) if self.kind == "classification" else Measured()
        for name, other in data.others.items():
            found |= self._on(name, other, data, self.outputs(model, tokenizer, other.rows, batch_size=batch_size)[0])

        def again() -> Metrics:
            return self.essentials(self.outputs(model, tokenizer, rows, batch_size=batch_size)[0], rows)

        return found | Measured(dict(at_few_bits(model, self.bits, self.rounding, again)))

    def essentials(self, logits: Tensor, rows: Sequence[Row]) -> Metrics:
        """Returns the primary metric, and the quality of the probabilities before and after temperature scaling."""
        primary = {self.primary: self.measure(logits, rows)[self.primary]}
        classes = self.kind == "classification"
        return primary | (quality_of_run(logits, self.labels(rows)).metrics if classes else {})

    def labels(self, rows: Sequence[Row]) -> Tensor:
        """Returns the numbers of the classes of the rows."""
        return torch.tensor([row["label"] for row in rows])

    def _on(self, name: str, other: OtherSet, data: Data, logits: Tensor) -> Measured:
        if self.kind == "regression":
            found = Measured(self.measure(logits, other.rows))
        else:
            logits = other_logits(other, logits, data.classes)
            whole = quality_of_run(logits, self.labels(other.rows))
            bins = {key: one for key, one in whole.reliability.items() if key == "evaluation"}  # none if it diverged
            found = Measured(self.measure(logits, other.rows) | whole.metrics, bins)
        metrics = {f"{key}_on_{name}": value for key, value in found.metrics.items()}
        return Measured(metrics, {f"on_{name}": bins for bins in found.reliability.values()})


def _length(item: Item) -> int:
    parts = (item["first"], item["second"]) if "first" in item else (item,)
    return sum(len(part["input_ids"]) for part in parts)
