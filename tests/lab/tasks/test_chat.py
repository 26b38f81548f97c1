"""Conversations: only the assistant's turns are learned; metrics against a loop; long and wrong conversations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deltasam.lab.experiments import RunConfig, load_run, run
from deltasam.lab.sweeps import record_weights
from deltasam.lab.tasks import ChatTask, DataError, DataSource, find_task, load_tokenizer
from helpers.pretrained import CHAT, llama_folder

TASK = ChatTask(name="own", general_rows=0, bits=())
TURNS = [
    {"role": "system", "content": "it is the name"},
    {"role": "user", "content": "get it"},
    {"role": "assistant", "content": "the file"},
    {"role": "user", "content": "return it"},
    {"role": "assistant", "content": "of it"},
]
ROWS = [{"messages": TURNS}, {"messages": TURNS[1:3]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def test_the_assistants_turns_with_their_ends_are_learned(tokenizer: Any) -> None:
    first, second = TASK.encode(ROWS, tokenizer)
    assert tokenizer.decode([t for t in first["labels"] if t >= 0]) == "the file [SEP] of it [SEP]"
    assert tokenizer.decode([t for t in second["labels"] if t >= 0]) == "the file [SEP]"
    assert all(label in (-100, token) for token, label in zip(first["input_ids"], first["labels"], strict=True))
    assert tokenizer.decode(second["input_ids"]) == "[CLS] user : get it [SEP] [CLS] assistant : the file [SEP]"


@pytest.mark.parametrize("trim", [False, True])
def test_tokens_that_contain_spaces_are_learned(trim: bool) -> None:
    """A token may begin in the prompt, whose last space it takes; one of spaces alone may have an empty span."""
    spaces = byte_level(trim=trim)
    conversation = [{"role": "user", "content": "get it"}, {"role": "assistant", "content": "the  file name"}]
    (item,) = TASK.encode([{"messages": conversation}], spaces)
    learned = [token for token in item["labels"] if token >= 0]
    assert spaces.convert_ids_to_tokens(learned) == ["Ġthe", "Ġ", "Ġfile", "Ġname", "[SEP]"]


def byte_level(*, trim: bool) -> Any:
    """A byte-level tokenizer, as of GPT-2, whose words begin with their space; its prompt ends with a space."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    options = {"special_tokens": ["[PAD]", "[SEP]"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    inner.train_from_iterator(["get it: the file name"] * 9, trainers.BpeTrainer(show_progress=False, **options))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[SEP]")
    made.chat_template = CHAT.replace("[CLS]", "")
    return made


def test_metrics_against_a_loop(folder: Path, tokenizer: Any) -> None:
    model = TASK.model(str(folder), TASK.check({"train": ROWS}, {})).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    nll, right = [], []
    with torch.no_grad():
        for item in TASK.encode(ROWS, tokenizer):
            log_p = model(input_ids=torch.tensor([item["input_ids"]])).logits[0].double().log_softmax(-1)
            for t, label in enumerate(item["labels"]):
                if label >= 0:
                    nll.append(-log_p[t - 1, label].item())
                    right.append(int(log_p[t - 1].argmax()) == label)
    found = TASK.evaluate(model, tokenizer, ROWS)
    assert found["nll"] == pytest.approx(sum(nll) / len(nll), abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert not TASK.higher_is_better


def test_the_last_turn_is_generated(folder: Path, tokenizer: Any) -> None:
    task = replace(TASK, metrics=("rouge1", "nll"), max_new_tokens=4)
    model = task.model(str(folder), task.check({"train": ROWS}, {})).eval()
    written = task.generate(model, tokenizer, ROWS, batch_size=2)
    for row, text in zip(ROWS, written, strict=True):
        start = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(start, add_special_tokens=False, return_tensors="pt")["input_ids"]
        alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert text == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert set(task.evaluate(model, tokenizer, ROWS)) == {"rouge1", "nll", "loss"}
    assert task.higher_is_better


def test_a_long_question_is_cut_and_the_answer_stays(tokenizer: Any) -> None:
    long = [{"role": "user", "content": "the file " * 50}, {"role": "assistant", "content": "of it"}]
    task = replace(TASK, max_length=24)
    (item,) = task.encode([{"messages": long}], tokenizer)
    assert len(item["input_ids"]) <= 24
    assert tokenizer.decode([t for t in item["labels"] if t >= 0]) == "of it [SEP]"
    assert len(task._prompt(long, tokenizer)) <= 24


def test_conversations_without_room_for_an_answer_are_left_out(tokenizer: Any, caplog: Any) -> None:
    silent = [{"role": "user", "content": ""}] * 6  # four tokens each
    rows = [{"messages": TURNS[1:3]}, {"messages": [*silent, *TURNS[1:3]]}]
    assert len(replace(TASK, max_length=20).encode(rows, tokenizer)) == 1
    assert "1 of 2 conversations are left out" in caplog.text
    with pytest.raises(DataError, match="no turn of the assistant fits"):
        replace(TASK, max_length=6).encode(rows[:1], tokenizer)


def test_weights_have_the_texts_of_the_conversations_that_are_not_left_out(folder: Path, tmp_path: Path) -> None:
    silent = [{"role": "user", "content": ""}] * 6
    rows = [{"messages": turns} for turns in ([*silent, *TURNS[1:3]], TURNS[1:3], TURNS[3:])]
    own = tmp_path / "chat.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": str(own), "validation": str(own)}
    config = RunConfig.from_plain(
        {
            "task": {"name": "chat", "files": files, "max_length": 20, "general_rows": 0, "bits": []},
            "model": str(folder),
            "method": "delta-sam",
            "optimizer": {"lr": 1e-3},
            "schedule": {"steps": 1},
            "batch": {"size": 4},
        }
    )
    run(config, tmp_path / "run")
    _, loaded = load_run(tmp_path / "run")
    assert [len(batch["labels"]) for batch in loaded.batches(4)] == [2]
    found = record_weights(tmp_path / "run", batch_size=4)
    assert {example["text"] for example in found["examples"]} == {f"messages: {row['messages']}" for row in rows[1:]}


def test_files_of_the_user_and_tables_with_two_columns(tmp_path: Path) -> None:
    own = tmp_path / "chat.jsonl"
    own.write_text("".join(json.dumps({**row, "id": 1}) + "\n" for row in ROWS))
    task = replace(find_task("chat"), files={"train": str(own), "validation": str(own)}, general_rows=0)
    assert task.load(DataSource()).splits["train"] == ROWS
    table = ChatTask(name="own", user="Add {a}", assistant="{b}", general_rows=0)
    data = table.check({"train": [{"a": "1 + 1", "b": "2"}]}, {})
    assert data.splits["train"][0]["messages"][0] == {"role": "user", "content": "Add 1 + 1"}


def test_summaries(shared: Path) -> None:
    task = find_task("cnn_dailymail-chat")
    data = task.load(DataSource.find(shared / "data"))
    user, assistant = data.splits["train"][0]["messages"]
    assert user["content"].startswith("Summarize this article")
    assert len(user["content"]) > len(assistant["content"]) > 50


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("hello", "must be a list of turns"),
        ([], "must be a list of turns"),
        ([{"role": "user"}], "turn 0 must have a role and a content"),
        ([{"role": "user", "content": 3}], "turn 0 must have a role and a content"),
        ([{"role": "assistant", "content": "hello"}], "starts with the assistant"),
        ([{"role": "user", "content": "hello"}], "no turn of the assistant"),
    ],
)
def test_wrong_conversations(turns: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"train: column 'messages' in row 0.*{message}"):
        TASK.check({"train": [{"messages": turns}]}, {})


def test_wrong_options(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"task.user and task.assistant belong together"):
        replace(TASK, user="{a}")
    with pytest.raises(DataError, match="no column 'messages' in row 0"):
        TASK.check({"train": [{"text": "a"}]}, {})
    reversed_template = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    reversed_template.chat_template = "{% for m in messages[::-1] %}{{ m['content'] + ' ' }}{% endfor %}"
    with pytest.raises(DataError, match="changes earlier turns"):
        TASK.encode(ROWS[:1], reversed_template)
