"""Classification and regression: batches, losses and metrics agree with Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasam.lab.tasks import Data, DataError, PromptTask, SentenceTask, find_model, find_task, load_tokenizer
from deltasam.lab.tasks._models import load_model
from helpers.pretrained import bert_folder

ROWS = [{"sentence1": f"get the {w}", "sentence2": "x" * (i + 1), "label": i % 2} for i, w in enumerate("abcdefghi")]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_folder(tmp_path_factory.mktemp("bert")))


def _made(task: SentenceTask, path: str, rows: list[dict[str, Any]]) -> tuple[Any, Any, Data]:
    data = task.check({"train": rows}, {})
    return task.model(path, data).eval(), load_tokenizer(path), data


def test_loss_of_a_batch_is_hugging_faces(bert: str) -> None:
    for name, rows in (("mrpc", ROWS), ("stsb", [{**row, "label": 0.7 * i} for i, row in enumerate(ROWS)])):
        task = find_task(name)
        model, tokenizer, data = _made(task, bert, rows)
        batch = task.collator(tokenizer)(task.encode(data.splits["train"], tokenizer))
        torch.testing.assert_close(task.objective()(model, batch).mean(), model(**batch).loss)


def test_pairs_are_padded_to_the_longest_or_to_the_full_length(bert: str) -> None:
    task = find_task("mrpc")
    _, tokenizer, data = _made(task, bert, ROWS)
    items = task.encode(data.splits["train"], tokenizer)
    assert task.collator(tokenizer)(items)["input_ids"].shape == (9, max(len(item["input_ids"]) for item in items))
    assert replace(task, pad_to_max_length=True).collator(tokenizer)(items)["input_ids"].shape == (9, 128)
    short = replace(task, max_length=6).encode(data.splits["train"], tokenizer)
    assert max(len(item["input_ids"]) for item in short) == 6


def test_evaluation_equals_predictions_one_by_one(bert: str) -> None:
    task = find_task("mrpc")
    model, tokenizer, data = _made(task, bert, ROWS)
    model.train()
    found = task.evaluate(model, tokenizer, data.splits["train"], batch_size=4)
    assert model.training  # as before
    model.eval()
    right, losses = [], []
    for row in data.splits["train"]:
        batch = tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt")
        outputs = model(**batch, labels=torch.tensor([row["label"]]))
        right.append(int(outputs.logits.argmax()) == row["label"])
        losses.append(outputs.loss.item())
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_f1_of_three_classes_is_the_macro_average(bert: str) -> None:
    task = SentenceTask(name="own", text=("sentence1",), classes=("a", "b", "c"))
    model, tokenizer, data = _made(task, bert, ROWS)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))  # predicts the second; the third has no rows
    right = sum(row["label"] for row in ROWS)
    found = task.evaluate(model, tokenizer, data.splits["train"])["f1"]
    assert found == pytest.approx((2 * right / (right + len(ROWS)) + 0) / 2)


def test_siamese_starts_from_the_cosine_and_survives_saving(bert: str, tmp_path: Path) -> None:
    task = replace(find_task("docstrings"), pairing="siamese")
    model, tokenizer, data = _made(task, bert, ROWS)
    batch = task.collator(tokenizer)(task.encode(data.splits["train"], tokenizer))
    logits = model(**{name: value for name, value in batch.items() if name != "labels"})

    def embedding(text: str) -> torch.Tensor:
        return model.encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    for row, found in zip(ROWS, logits, strict=True):
        cosine = torch.cosine_similarity(embedding(row["sentence1"]), embedding(row["sentence2"]), dim=0)
        torch.testing.assert_close(found, torch.stack([-4 * (cosine - 0.4), 4 * (cosine - 0.4)]), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model.head.bias.add_(1.0)
    model.save_pretrained(tmp_path / "saved")
    again = task.model(str(tmp_path / "saved"), data).eval()
    torch.testing.assert_close(again(**{k: v for k, v in batch.items() if k != "labels"}), logits + 1.0)
    whole = {name: w + 1.0 if name == "head.bias" else w for name, w in model.state_dict().items()}
    model.save_pretrained(tmp_path / "gathered", state_dict=whole)  # as for a sharded model
    again = task.model(str(tmp_path / "gathered"), data).eval()
    torch.testing.assert_close(again(**{k: v for k, v in batch.items() if k != "labels"}), logits + 2.0)


def test_head_follows_the_seed(bert: str) -> None:
    task = find_task("mnli")
    data = Data({}, {}, task.classes)
    torch.manual_seed(1)
    first = task.model(bert, data)
    torch.manual_seed(1)
    second = task.model(bert, data)
    assert first.config.num_labels == 3
    assert first.config.id2label[1] == "neutral"
    assert torch.equal(first.classifier.weight, second.classifier.weight)


def test_models_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"no such folder"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no config.json"):
        find_model(str(tmp_path))
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE.*minilm-l6"):
        find_model("bert-base-nonsense")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_padding(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(DataError, match=r"no padding token.*tokenizer\.pad_token = .*save_pretrained"):
        load_tokenizer(str(folder))


def test_bad_options_raise(bert: str) -> None:
    with pytest.raises(ValueError, match=r"one column, or two"):
        SentenceTask(name="x", text=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"task.metrics=\['acuracy'\]"):
        SentenceTask(name="x", metrics=("acuracy",))
    for kind in (SentenceTask, PromptTask):
        with pytest.raises(ValueError, match=r"task.metrics=\['accuracy'\]"):  # it would fail after the training
            kind(name="x", kind="regression", metrics=("accuracy",))
    with pytest.raises(ValueError, match=r"task.max_length=0"):
        SentenceTask(name="x", max_length=0)
    with pytest.raises(ValueError, match=r"task.pairing=siamese needs two columns"):
        SentenceTask(name="x", pairing="siamese")
    assert SentenceTask(name="x", kind="regression", metrics=("mse",)).higher_is_better is False


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification as Auto

    folder = bert_folder(tmp_path / "bert")
    load_model(Auto, str(folder), num_labels=3).save_pretrained(folder)
    with pytest.raises(DataError, match=r"could not be loaded as .*another number of classes"):
        load_model(Auto, str(folder), num_labels=2)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:200])
    with pytest.raises(DataError, match=r"could not be loaded as .*header"):
        load_model(Auto, str(folder), num_labels=3)
