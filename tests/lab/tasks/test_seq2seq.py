"""Sequence-to-sequence tasks: losses and beam search agree with Hugging Face."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltasam.lab.tasks import Data, DataError, Seq2SeqTask, find_task, load_tokenizer
from helpers.pretrained import bart_folder

ROWS = [{"source": "get the file name " * (i + 1), "target": f"name {i} . it is set ." + " yes" * i} for i in range(5)]
TASK = replace(
    find_task("seq2seq"), max_length=40, max_target_length=12, min_target_length=3, beams=2, length_penalty=2.0,
    no_repeat_ngram_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bart_folder(tmp_path_factory.mktemp("bart")))


def test_only_cnn_dailymail_has_the_lengths_of_its_summaries() -> None:
    def rules(name: str) -> tuple[int, float, int]:
        task = find_task(name)
        return task.min_target_length, task.length_penalty, task.no_repeat_ngram_size

    assert rules("cnn_dailymail") == (56, 2.0, 3)
    assert rules("seq2seq") == (0, 1.0, 0)


def test_unknown_metrics_raise() -> None:
    with pytest.raises(ValueError, match=r"task.metrics=\['bleu'\] .* seq2seq: rouge1, rouge2"):
        replace(TASK, metrics=("bleu",))
    with pytest.raises(ValueError, match=r"task.metrics=\[\] .* rouge1, rouge2"):
        replace(TASK, metrics=())


def test_token_losses_are_hugging_faces(bart: str) -> None:
    task = replace(TASK, label_smoothing=0.0)
    model, tokenizer = task.model(bart, Data({}, {})).eval(), load_tokenizer(bart)
    batch = task.collator(tokenizer)(task.encode(ROWS, tokenizer))
    assert (batch["labels"] == -100).any()
    torch.testing.assert_close(task.objective()(model, batch).mean(), model(**batch).loss)


def test_smoothed_losses_are_hugging_faces(bart: str) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    model, tokenizer = TASK.model(bart, Data({}, {})).eval(), load_tokenizer(bart)
    batch = TASK.collator(tokenizer)(TASK.encode(ROWS, tokenizer))
    theirs = LabelSmoother(epsilon=0.1)(model(**batch), batch["labels"])
    torch.testing.assert_close(TASK.objective()(model, batch).mean(), theirs)


def test_beam_search_is_generate_one_by_one(bart: str) -> None:
    model, tokenizer = TASK.model(bart, Data({}, {})).eval(), load_tokenizer(bart)
    found = TASK.generate(model, tokenizer, ROWS, batch_size=3)
    for row, text in zip(ROWS, found, strict=True):
        inputs = tokenizer([row["source"]], truncation=True, max_length=40, return_tensors="pt")
        options = {"num_beams": 2, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "early_stopping": True}
        ids = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], min_length=3, max_length=12, **options
        )
        assert text == tokenizer.batch_decode(ids, skip_special_tokens=True)[0]


def test_evaluation_reports_rouge(bart: str) -> None:
    model, tokenizer = TASK.model(bart, Data({}, {})), load_tokenizer(bart)
    found = TASK.evaluate(model, tokenizer, ROWS)
    assert set(found) == {"rouge1", "rouge2", "rougeLsum", "words"}
    assert all(0 <= found[name] <= 1 for name in TASK.metrics)


@pytest.mark.parametrize(
    ("targets", "warns"),
    [
        (["в 2024 году шёл дождь", "昨日は雨だった"], True),
        (["it rained in Łódź", "im Jahr 2024 regnete es über Köln", "12"], False),
    ],
)
def test_rouge_warns_about_other_scripts(targets: list[str], warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    Seq2SeqTask(name="own").check({"train": [{"source": "rain", "target": text} for text in targets]}, {})
    assert ("train: ROUGE ignores characters except a-z and 0-9" in caplog.text) == warns


def test_bad_rows() -> None:
    with pytest.raises(DataError, match="column 'target' is empty in row 1"):
        TASK.check({"train": [ROWS[0], {"source": "a", "target": "  "}]}, {})
    with pytest.raises(DataError, match="did you mean 'target'"):
        Seq2SeqTask(name="x", target="targte").check({"train": [ROWS[0]]}, {})
    with pytest.raises(ValueError, match="min_target_length=20"):
        replace(TASK, min_target_length=20)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_as_the_tokenizer_pads_them(bart: str, side: str) -> None:
    tokenizer = load_tokenizer(bart)
    tokenizer.padding_side = side
    items = TASK.encode(ROWS, tokenizer)
    inputs = [{name: item[name] for name in ("input_ids", "attention_mask")} for item in items]
    expected = dict(tokenizer.pad(inputs, return_tensors="pt"))
    found = TASK.collator(tokenizer)(items)
    assert found.keys() == {*expected, "labels"}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    longest = max(len(item["labels"]) for item in items)
    assert found["labels"].tolist() == [one["labels"] + [-100] * (longest - len(one["labels"])) for one in items]
