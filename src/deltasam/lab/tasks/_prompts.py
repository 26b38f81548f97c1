"""Classification by a language model: the text becomes a prompt, the class a word that answers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltasam.lab.tasks._base import Item, batches, evaluating
from deltasam.lab.tasks._data import Data, DataError, Row, Split
from deltasam.lab.tasks._docstrings import DocstringTask
from deltasam.lab.tasks._encoding import once
from deltasam.lab.tasks._language import IGNORED, LanguageTask, last_logits, starts_with, token_ids
from deltasam.lab.tasks._measured import Measured, Metrics, quality
from deltasam.lab.tasks._metrics import METRICS
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._source import DataSource
from deltasam.objectives import Objective

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_QUALITY = ("nll", "ece", "brier")


@dataclass(frozen=True, kw_only=True)
class PromptTask(LanguageTask, SentenceTask):
    r"""A task of sentences for a causal language model, with the loss on the answer only.

    The model reads the prompt and is trained to continue it with the word of the class. In the evaluation, the
    log-probabilities of all words are compared; normalised over the words they are the probabilities of the classes,
    from which ``nll``, ``ece`` (15 bins) and ``brier`` are computed. ``loss`` is the cross-entropy over the whole
    vocabulary, as in training. Scores of a regression are rounded to the nearest word in training; the prediction is
    the mean of the words under their probabilities.

    Attributes:
        template: The prompt, with the columns of the text in braces. By default the texts, one per line, and
            ``Answer:``.
        words: The answer for each class, in the order of the classes; the names of the classes by default. A space
            is put in front.
        chat: Put the prompt into the user's turn of the tokenizer's chat template.

    Example:
        >>> from deltasam.lab.tasks import find_task
        >>> task = find_task("rte-prompt")
        >>> task.prompt({"sentence1": "It rains.", "sentence2": "It is dry."})
        'It rains.\nQuestion: It is dry. True or false?\nAnswer:'
        >>> task.words
        ('true', 'false')
    """

    metrics: tuple[str, ...] = ("accuracy", "nll", "ece")
    max_length: int = 256
    template: str = ""
    words: tuple[str, ...] = ()
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairing != "joint" or self.pad_to_max_length:
            raise ValueError("task.pairing and task.pad_to_max_length do not exist for prompts")
        named = [name for _, name, _, _ in Formatter().parse(self.template) if name is not None]
        if self.template and (set(named) != set(self.text) or self.template != self.template.strip()):
            raise ValueError(
                f"task.template={self.template!r} must contain every column of task.text={list(self.text)} in braces "
                "and no others, without spaces at its ends"
            )
        if self.words and len(set(self.words)) < len(self.words):
            raise ValueError(f"task.words={list(self.words)} must not contain duplicates")
        if self.words and self.classes and len(self.words) != len(self.classes):
            raise ValueError(f"task.words={list(self.words)} must be one for each of {len(self.classes)} classes")
        if self.kind == "regression":
            try:
                tuple(map(float, self.words))
            except ValueError:
                raise ValueError(f"task.words={list(self.words)} must be numbers for task.kind=regression") from None

    @property
    def reported(self) -> tuple[str, ...]:
        """The metrics of a task of sentences, and the quality of the probabilities."""
        return (*super().reported, *_QUALITY)

    @property
    def answers(self) -> tuple[str, ...]:
        """The word of each class."""
        return self.words or self.classes

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Returns rows with the texts and a ``label``."""
        data = super().check(splits, origins)
        if self.kind == "classification" and not self.classes:  # they are not known where a prompt is encoded
            raise DataError(f"the classes of prompts must be named: task.classes=[{', '.join(data.classes)}]")
        if self.kind == "regression" and len(self.words) < 2:
            raise DataError("task.kind=regression: name the scores that the model may answer, task.words=[0, 1, 2, 3]")
        return data

    def prompt(self, row: Row) -> str:
        """Returns the prompt of a row."""
        if self.template:
            return self.template.format(**{column: row[column] for column in self.text})
        return "\n".join([*(row[column] for column in self.text), "Answer:"])

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns the tokens of prompt and answer; labels are those of the answer. The seed is not used."""
        words = self._words(tokenizer)
        items = []
        for row, prompt in zip(rows, self._prompts(rows, tokenizer), strict=True):
            answer = words[self._class(row)]
            items.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
        return items

    def objective(self) -> Objective:
        """Returns the cross-entropy of the answer's tokens."""
        return LanguageTask.objective(self)

    def outputs(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities of the words and the losses of the right ones; see :meth:`scores`."""
        return self.scores(model, tokenizer, rows, batch_size=batch_size)

    def measure(self, logits: Tensor, rows: Sequence[Row]) -> Metrics:
        """Returns the metrics of these log-probabilities."""
        if self.kind == "classification":
            predictions, options = logits.argmax(-1), {"f1": {"classes": logits.shape[1]}}
        else:
            values = torch.tensor([float(word) for word in self.answers], dtype=torch.float64)
            predictions, options = (logits.double().softmax(-1) * values).sum(-1), {}
        labels = [row["label"] for row in rows]
        asked = [name for name in self.metrics if name in METRICS]
        found = {name: METRICS[name](predictions.numpy(), labels, **options.get(name, {})) for name in asked}
        found |= quality(logits, self.labels(rows))
        return {name: found[name] for name in self.metrics}

    def labels(self, rows: Sequence[Row]) -> Tensor:
        """Returns the numbers of the answers of the rows."""
        return torch.tensor([self._class(row) for row in rows])

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
        """Returns forgetting, calibration, and the metrics with rounded weights and on other sets."""
        forgotten = Measured(self.forgotten(model, tokenizer, data, before))
        return forgotten | SentenceTask.final(self, model, tokenizer, data, rows, before=before, batch_size=batch_size)

    def scores(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities of the words, (rows, classes), and the losses of the right ones, (rows,).

        Words of one token take one forward pass, longer ones a pass per class.
        """
        words, prompts = self._words(tokenizer), once(self._prompts, rows, tokenizer)
        order = sorted(range(len(rows)), key=lambda index: len(prompts[index]))
        found = torch.zeros(len(rows), len(words), dtype=torch.float64)
        with evaluating(model) as device:
            for chunk in batches(order, batch_size):
                texts = [prompts[index] for index in chunk]
                for classes, log_p in self._log_probabilities(model, tokenizer, texts, words, device):
                    found[torch.tensor(chunk)[:, None], torch.tensor(classes)] = log_p.double().cpu()
        right = torch.tensor([self._class(row) for row in rows])
        lengths = torch.tensor([len(word) for word in words], dtype=torch.float64)
        chosen = found.gather(1, right[:, None]).squeeze(1)
        return found, -chosen / lengths[right]

    def _log_probabilities(
        self, model: Any, tokenizer: Any, prompts: list[list[int]], words: list[list[int]], device: torch.device
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yields classes and the log-probabilities of their words after each prompt, (prompts, classes)."""
        collate = self.collator(tokenizer)
        single = all(len(word) == 1 for word in words)
        for number, word in enumerate(words[:1] if single else words):
            items = [{"input_ids": ids + word, "labels": [IGNORED] * len(ids) + word} for ids in prompts]
            batch = {name: value.to(device) for name, value in collate(items).items()}
            log_p = last_logits(model, batch).float().log_softmax(-1)
            if single:
                yield list(range(len(words))), log_p[:, -2, [w[0] for w in words]]
                return
            targets = torch.tensor(word, device=device).expand(len(prompts), -1)
            at = log_p[:, -len(word) - 1 : -1].gather(-1, targets[..., None]).squeeze(-1)
            yield [number], at.sum(-1, keepdim=True)

    def _class(self, row: Row) -> int:
        if self.kind == "classification":
            return int(row["label"])
        return min(range(len(self.answers)), key=lambda index: abs(float(self.answers[index]) - row["label"]))

    def _words(self, tokenizer: Any) -> list[list[int]]:
        space = "" if self.chat else " "
        found = token_ids(tokenizer, [space + word for word in self.answers])
        if any(not word for word in found) or len(set(map(tuple, found))) < len(found):
            raise DataError(f"task.words={list(self.answers)}: the tokenizer does not distinguish these words")
        for (ids, word), (others, other) in pairwise(sorted(zip(found, self.answers, strict=True))):
            if others[: len(ids)] == ids:  # p(other) = p(word) p(rest | word)
                raise DataError(
                    f"task.words={list(self.answers)}: the tokens of {word!r} begin those of {other!r}, which would "
                    "never be predicted; choose words of which none begins with another"
                )
        return found

    def _prompts(self, rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
        """Returns the tokens of the prompts. One that is too long loses the end of its longest text."""
        room = self.max_length - max(map(len, self._words(tokenizer)))
        start = [] if self.chat else starts_with(tokenizer)
        found = [start + ids for ids in token_ids(tokenizer, [self._text(row, tokenizer) for row in rows])]
        return [
            ids if len(ids) <= room else self._shortened(row, ids, room, tokenizer, start)
            for ids, row in zip(found, rows, strict=True)
        ]

    def _shortened(self, row: Row, ids: list[int], room: int, tokenizer: Any, start: list[int]) -> list[int]:
        texts = dict(zip(self.text, token_ids(tokenizer, [row[column] for column in self.text]), strict=True))
        while len(ids) > room:
            longest = max(texts, key=lambda column: len(texts[column]))
            if not texts[longest]:
                raise DataError(f"task.max_length={self.max_length}: the prompt alone has {len(ids)} tokens; set more")
            texts[longest] = texts[longest][: -(len(ids) - room)] if len(ids) - room < len(texts[longest]) else []
            shorter = {column: tokenizer.decode(tokens) for column, tokens in texts.items()}
            ids = start + token_ids(tokenizer, [self._text(shorter, tokenizer)])[0]
        return ids

    def _text(self, row: Row, tokenizer: Any) -> str:
        prompt = self.prompt(row)
        if not self.chat:
            return prompt
        check_chat_template(tokenizer)
        turns = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def check_chat_template(tokenizer: Any) -> None:
    """Raises a DataError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer of this model has no chat template; use a model that was trained for chat (smollm2-135m), "
            "or save one with the tokenizer (tokenizer.chat_template = ...)"
        )


@dataclass(frozen=True, kw_only=True)
class DocstringPromptTask(PromptTask, DocstringTask):
    """The pairs of :class:`DocstringTask` as prompts: a task for a language model without download."""

    text: tuple[str, ...] = ("sentence1", "sentence2")
    classes: tuple[str, ...] = ("mismatch", "match")
    metrics: tuple[str, ...] = ("accuracy", "nll", "ece")
    max_length: int = 64
    template: str = "{sentence1}: {sentence2}\nCorrect:"
    words: tuple[str, ...] = ("no", "yes")

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return DocstringTask.data_note.fget(self)  # type: ignore[attr-defined, no-any-return]

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of a split."""
        return DocstringTask.read(self, source, split)


_NO_YES = ("no", "yes")
_TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mnli": ("{premise}\nQuestion: {hypothesis} True, false or neither?\nAnswer:", ("true", "neither", "false")),
    "qqp": ("{question1}\n{question2}\nDo the two questions have the same meaning?\nAnswer:", _NO_YES),
    "qnli": ("{question}\n{sentence}\nDoes the sentence answer the question?\nAnswer:", ("yes", "no")),
    "sst2": ("{sentence}\nSentiment:", ("negative", "positive")),
    "mrpc": ("{sentence1}\n{sentence2}\nDo the two sentences have the same meaning?\nAnswer:", _NO_YES),
    "cola": ("{sentence}\nIs this sentence grammatical?\nAnswer:", _NO_YES),
    "rte": ("{sentence1}\nQuestion: {sentence2} True or false?\nAnswer:", ("true", "false")),
    "stsb": ("{sentence1}\n{sentence2}\nHow similar are they, from 0 to 5?\nAnswer:", tuple("012345")),
}


def as_prompts(task: SentenceTask) -> PromptTask:
    """Returns a GLUE task as prompts, named ``<task>-prompt``."""
    template, words = _TEMPLATES[task.name]
    return PromptTask(
        name=f"{task.name}-prompt",
        dataset=task.dataset,
        hub=task.hub,
        stand_ins=task.stand_ins,
        eval_split=task.eval_split,
        kind=task.kind,
        text=task.text,
        label=task.label,
        classes=task.classes,
        metrics=(*task.metrics, "nll", "ece"),
        template=template,
        words=words,
    )
