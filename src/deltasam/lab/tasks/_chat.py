"""Conversations: a language model learns the assistant's turns."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

from deltasam.lab.tasks._base import Item, batches, evaluating
from deltasam.lab.tasks._checks import check_columns, check_texts
from deltasam.lab.tasks._data import Data, DataError, Row
from deltasam.lab.tasks._encoding import once
from deltasam.lab.tasks._language import IGNORED, LanguageTask, last_logits, positions
from deltasam.lab.tasks._metrics import LOWER_IS_BETTER, rouge
from deltasam.lab.tasks._prompts import check_chat_template
from deltasam.lab.tasks._summarization import by_sentence
from deltasam.objectives import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_TOKENS = ("nll", "perplexity", "token_accuracy")
_ROUGE = ("rouge1", "rouge2", "rougeLsum")
Turns = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class ChatTask(LanguageTask):
    """Conversations in the chat template of the tokenizer, with the loss on the assistant's turns only.

    A row holds a list of turns, ``{"role": "user", "content": "..."}``, as in the files of TRL. A table with a column
    for the question and one for the answer becomes conversations of two turns by ``user`` and ``assistant``.

    A conversation that is too long loses the end of its longest turn that is not the assistant's, and then its own
    end.

    ``nll`` is the mean negative log-probability of the assistant's tokens, ``perplexity`` its exponential, and
    ``token_accuracy`` the fraction of these tokens that are the most probable. ROUGE is measured if it is among
    ``metrics``: the last turn of the assistant is generated greedily.

    Attributes:
        messages: The column of the turns.
        user: The user's turn, with columns in braces, for tables that have no turns.
        assistant: The assistant's turn, with columns in braces.
        max_new_tokens: Longest generated turn in tokens.

    Example:
        >>> task = ChatTask(name="own", user="Translate: {en}", assistant="{de}")
        >>> task.turns({"en": "yes", "de": "ja"})[1]
        {'role': 'assistant', 'content': 'ja'}
    """

    metrics: tuple[str, ...] = _TOKENS
    max_length: int = 512
    messages: str = "messages"
    user: str = ""
    assistant: str = ""
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.user) != bool(self.assistant):
            raise ValueError("task.user and task.assistant belong together: set both, or neither for task.messages")

    @property
    def reported(self) -> tuple[str, ...]:
        """Log loss and accuracy of the tokens, and ROUGE of generated turns."""
        return (*_TOKENS, *_ROUGE)

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the primary metric is better."""
        return self.primary not in LOWER_IS_BETTER

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        default = "your own conversations (JSON Lines): task.files.train=..."
        return super().data_note if self.files or self.hub else default

    def check(self, splits: dict[str, list[Row]], origins: dict[str, str]) -> Data:
        """Returns rows with the turns."""
        checked = {}
        for split, rows in splits.items():
            origin = origins.get(split, split)
            if self.user:
                columns = sorted({name for text in (self.user, self.assistant) for name in _columns(text)})
                check_columns(rows, columns, origin)
                check_texts(rows, columns, origin, allow_empty=not self.own)
            else:
                check_columns(rows, (self.messages,), origin)
                for index, row in enumerate(rows):
                    _check_turns(row[self.messages], f"{origin}: column {self.messages!r} in row {index}")
            checked[split] = [{"messages": self.turns(row)} for row in rows]
        return Data(checked, origins)

    def turns(self, row: Row) -> Turns:
        """Returns the turns of a row as it is stored."""
        if not self.user:
            return [{"role": turn["role"], "content": turn["content"]} for turn in row[self.messages]]
        return [
            {"role": "user", "content": self.user.format(**row)},
            {"role": "assistant", "content": self.assistant.format(**row)},
        ]

    def encode(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> list[Item]:
        """Returns the tokens of the conversations; labels are those of the assistant. The seed is not used."""
        check_chat_template(tokenizer)
        found = [self._encoded(row["messages"], tokenizer) for row in rows]
        kept = [item for item in found if _has_target(item)]
        if not kept:
            raise DataError(f"task.max_length={self.max_length}: no turn of the assistant fits; set more")
        if len(kept) < len(found):
            _log.warning("%d of %d conversations are left out: within task.max_length=%d they have no turn of the "
                         "assistant", len(found) - len(kept), len(found), self.max_length)  # fmt: skip
        return kept

    def encoded_rows(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Row]:
        """Returns the conversations that have a turn of the assistant within the length."""
        return [row for row in rows if _has_target(self._encoded(row["messages"], tokenizer))]

    def evaluate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> dict[str, float]:
        """Returns the metrics. ``loss`` is the same as ``nll``."""
        collate, objective = self.collator(tokenizer), CausalLM(predict=last_logits)
        total, right, count = 0.0, 0, 0
        items = sorted(once(self.encode, rows, tokenizer), key=lambda item: len(item["input_ids"]))
        with evaluating(model) as device:
            for chunk in batches(items, batch_size):
                batch = {name: value.to(device) for name, value in collate(chunk).items()}
                logits, targets = objective.forward(model, batch), objective.targets(batch)
                tokens = int((targets != IGNORED).sum())
                total += float(objective.losses(logits, batch).double().mean()) * tokens
                right += int((logits.argmax(-1) == targets).sum())
                count += tokens
        nll = total / count
        found = {"nll": nll, "perplexity": math.exp(min(nll, 700)), "token_accuracy": right / count}
        if set(_ROUGE) & set(self.metrics):
            written = self.generate(model, tokenizer, rows, batch_size=batch_size)
            references = [by_sentence(_last_answer(row["messages"])[1]) for row in rows]
            found |= rouge([by_sentence(text) for text in written], references)
        return {**{name: found[name] for name in self.metrics}, "loss": nll}

    def generate(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
    ) -> list[str]:
        """Returns the last turn of the assistant in each row, generated greedily, in the order of the rows."""
        collate = self.collator(tokenizer)
        prompts = [self._prompt(row["messages"], tokenizer) for row in rows]
        order = sorted(range(len(rows)), key=lambda index: len(prompts[index]))
        found: dict[int, str] = {}
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        with evaluating(model) as device:
            for chunk in batches(order, batch_size):
                batch = collate([{"input_ids": prompts[i], "labels": prompts[i]} for i in chunk])
                mask = batch["attention_mask"].to(device)
                made = model.generate(
                    input_ids=batch["input_ids"].to(device),
                    attention_mask=mask,
                    position_ids=positions(mask),
                    eos_token_id=tokenizer.eos_token_id,
                    **options,
                )
                texts = tokenizer.batch_decode(made[:, mask.shape[1] :], skip_special_tokens=True)
                found |= dict(zip(chunk, texts, strict=True))
        return [found[index].strip() for index in range(len(rows))]

    def _encoded(self, turns: Turns, tokenizer: Any) -> Item:
        ids, labels = _tokens(turns, tokenizer)
        for _ in range(3):  # cutting a text may change the tokens at its end
            over = len(ids) - self.max_length
            if over <= 0:
                break
            shorter = _shortened(turns, over, tokenizer)
            if shorter is None:
                break
            turns = shorter
            ids, labels = _tokens(turns, tokenizer)
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _prompt(self, turns: Turns, tokenizer: Any) -> list[int]:
        before: Turns = turns[: _last_answer(turns)[0]]
        for _ in range(4):
            text = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            shorter = _shortened(before, len(ids) - self.max_length, tokenizer) if len(ids) > self.max_length else None
            if shorter is None:
                break
            before = shorter
        return ids[-self.max_length :]


def _has_target(item: Item) -> bool:
    return any(label != IGNORED for label in item["labels"])


def _tokens(turns: Turns, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens of a conversation, and the labels: those inside a turn of the assistant, with its end."""
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        start = tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True)
        stop = tokenizer.apply_chat_template(turns[: index + 1], tokenize=False)
        if not (text.startswith(stop.rstrip()) and stop.startswith(start)):
            raise DataError(
                "the chat template of this tokenizer changes earlier turns when later ones are added, so the turns of "
                "the assistant cannot be found; use conversations of one turn each, or another template"
            )
        spans.append((len(start), len(stop.rstrip())))
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A word may begin with the last space of the prompt. A token of spaces alone may have an empty span, at its end.
    inside = [any(start < b and a < stop for start, stop in spans) for a, b in made["offset_mapping"]]
    ids: list[int] = made["input_ids"]
    return ids, [token if learned else IGNORED for token, learned in zip(ids, inside, strict=True)]


def _shortened(turns: Turns, over: int, tokenizer: Any) -> Turns | None:
    """Returns the turns without the last ``over`` tokens of the longest one that is not the assistant's, or None."""
    lengths = {i: len(turn["content"]) for i, turn in enumerate(turns) if turn["role"] != "assistant"}
    if not lengths or not max(lengths.values()):
        return None
    longest = max(lengths, key=lambda index: lengths[index])
    ids = tokenizer(turns[longest]["content"], add_special_tokens=False)["input_ids"]
    content = tokenizer.decode(ids[: max(0, len(ids) - over)])
    return [{**turn, "content": content} if i == longest else turn for i, turn in enumerate(turns)]


def _last_answer(turns: Turns) -> tuple[int, str]:
    """Returns index and text of the assistant's last turn."""
    return next((i, turns[i]["content"]) for i in reversed(range(len(turns))) if turns[i]["role"] == "assistant")


def _columns(text: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(text) if name]


def _check_turns(turns: Any, where: str) -> None:
    """Raises a DataError for anything but a list of turns with a role and a text, one of them the assistant's."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where} must be a list of turns, each with role and content, not {turns!r:.100}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: turn {number} must have a role and a content, both text, not {turn!r:.100}")
    if turns[0]["role"] == "assistant":
        raise DataError(f"{where} starts with the assistant, which then answers nothing; drop that turn")
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        raise DataError(f"{where} has no turn of the assistant, so there is nothing to learn; drop such rows")


CNN_DAILYMAIL_CHAT = ChatTask(
    name="cnn_dailymail-chat",
    dataset="cnn_dailymail",
    hub="abisee/cnn_dailymail:3.0.0",
    user="Summarize this article in three sentences.\n\n{article}",
    assistant="{highlights}",
    metrics=("rougeLsum", "rouge1", "rouge2", "nll"),
)
