"""Prompts: answers are learned and compared; batches are equal to single rows; what is measured at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltasam.analysis import quantized
from deltasam.lab.tasks import GLUE, PROMPTS, DataError, DataSource, PromptTask, find_task, load_tokenizer
from deltasam.lab.tasks._language import LeftPadded, last_logits
from deltasam.methods import PerInstanceSAM
from helpers.pretrained import llama_folder
from helpers.tiny import causal

ROWS = [
    {"text": "the name of it", "label": 1},
    {"text": "get the file and return it to the name of the file", "label": 0},
    {"text": "set", "label": 2},
]
TASK = PromptTask(name="own", classes=("a", "b", "c"), words=("the", "of", "with"), general_rows=0, bits=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture
def model(folder: Path) -> Any:
    made = TASK.model(str(folder), TASK.check({"train": ROWS}, {})).double().eval()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return made


def obvious(task: PromptTask, model: Any, tokenizer: Any, row: dict[str, Any]) -> list[float]:
    """The log-probability of every word after the prompt of one row, token by token."""
    prompt = tokenizer(task.prompt(row), add_special_tokens=False)["input_ids"]
    found = []
    for word in task.words:
        ids, total = list(prompt), 0.0
        for token in tokenizer(f" {word}", add_special_tokens=False)["input_ids"]:
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            total += float(logits.double().log_softmax(-1)[token])
            ids.append(token)
        found.append(total)
    return found


@pytest.mark.parametrize("words", [("the", "of", "with"), ("the", "no", "yes"), ("maybe", "no", "yes")])
@torch.no_grad()
def test_scores_and_losses_against_a_loop(words: tuple[str, ...], model: Any, tokenizer: Any) -> None:
    task = replace(TASK, words=words)
    scores, losses = task.scores(model, tokenizer, ROWS, batch_size=2)
    expected = torch.tensor([obvious(task, model, tokenizer, row) for row in ROWS], dtype=torch.float64)
    assert torch.allclose(scores, expected, atol=1e-5)  # log-probabilities are computed in float32
    lengths = [len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) for word in words]
    assert losses.tolist() == pytest.approx(
        [-expected[i, r["label"]].item() / lengths[r["label"]] for i, r in enumerate(ROWS)], abs=1e-5
    )
    found = task.evaluate(model, tokenizer, ROWS, batch_size=2)
    right = sum(int(expected[i].argmax()) == row["label"] for i, row in enumerate(ROWS))
    assert found["accuracy"] == pytest.approx(right / 3)
    labels = torch.tensor([row["label"] for row in ROWS])
    assert found["nll"] == pytest.approx(float(F.cross_entropy(expected, labels)), abs=1e-5)
    assert 0 <= found["ece"] <= 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padded_on_the_left_equals_one_text_after_the_other(kind: str) -> None:
    model = causal(kind).double()
    texts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    items = [{"input_ids": ids, "labels": [-100] * (len(ids) - 1) + ids[-1:]} for ids in texts]
    for collate in (LeftPadded(0), LeftPadded(0).to_multiple(8)):
        logits = last_logits(model, collate(items))
        for index, ids in enumerate(texts):
            alone = model(input_ids=torch.tensor([ids])).logits[0, -2:]
            assert torch.allclose(logits[index, -2:], alone, atol=1e-9)


def test_loss_is_that_of_the_answers_only(model: Any, tokenizer: Any) -> None:
    items = TASK.encode(ROWS, tokenizer)
    batch = TASK.collator(tokenizer)(items)
    losses = TASK.objective()(model, batch)
    assert batch["labels"].shape[1] == 2
    assert float(losses.detach().mean()) == pytest.approx(
        float(TASK.scores(model, tokenizer, ROWS)[1].mean()), abs=1e-5
    )
    assert [tokenizer.decode([t for t in item["labels"] if t >= 0]) for item in items] == ["of", "the", "with"]


def test_per_instance_perturbation_runs_in_low_rank_and_equals_the_loop(model: Any, tokenizer: Any) -> None:
    batch = TASK.collator(tokenizer)(TASK.encode(ROWS, tokenizer))
    grads = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        PerInstanceSAM(rho=0.05, engine=engine).backward(model, batch, TASK.objective())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*grads, atol=1e-5)  # norms are computed in float32


def test_long_texts_lose_their_end_and_keep_the_question(tokenizer: Any) -> None:
    task = replace(TASK, template="{text} is it the name?", max_length=16)
    long = {"text": "the file " * 20, "label": 0}
    (item,) = task.encode([long], tokenizer)
    assert 10 < len(item["input_ids"]) <= 16
    assert tokenizer.decode(item["input_ids"]).replace(" ", "").endswith("isitthename?the")
    with pytest.raises(DataError, match=r"max_length=4: the prompt alone has \d+ tokens"):
        replace(task, max_length=4).encode([long], tokenizer)


def test_chat_template(tokenizer: Any) -> None:
    (item,) = replace(TASK, chat=True).encode(ROWS[:1], tokenizer)
    assert tokenizer.decode(item["input_ids"]).startswith("[CLS] user : the name of it answer : [SEP] [CLS]")
    tokenizer_without = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer_without.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        replace(TASK, chat=True).encode(ROWS[:1], tokenizer_without)


def test_scores_of_a_regression(model: Any, tokenizer: Any) -> None:
    rows = [{"text": "it is", "label": 0.2}, {"text": "on it", "label": 1.7}, {"text": "for it", "label": 0.9}]
    task = PromptTask(name="own", kind="regression", words=("0", "1", "2"), metrics=("pearson", "mse"), general_rows=0)
    assert [task._class(row) for row in rows] == [0, 2, 1]
    with torch.no_grad():
        p = torch.tensor([obvious(task, model, tokenizer, row) for row in rows]).softmax(-1)
        found = task.evaluate(model, tokenizer, rows)
    expected = ((p @ torch.arange(3.0) - torch.tensor([0.2, 1.7, 0.9])) ** 2).mean()
    assert found["mse"] == pytest.approx(float(expected), abs=1e-4)


def test_what_is_measured_at_the_end(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    text = tmp_path / "general.txt"
    text.write_text("the name of the file is it and it is on the file\n\n" + "return it to the name " * 5)
    task = replace(TASK, general=str(text), general_rows=5, bits=(8, 2))
    data = task.load_general(task.check({"train": ROWS}, {}), DataSource())
    assert len(data.general) == 2
    model = peft.get_peft_model(task.model(str(folder), data), peft.LoraConfig(r=2, target_modules="all-linear"))
    before = task.initial(model, tokenizer, data)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    found = task.final(model, tokenizer, data, ROWS, before=before).metrics
    again = task.final(model, tokenizer, data, ROWS, before={}).metrics  # adapters disabled
    assert found == pytest.approx(again, rel=1e-5)
    assert found["forgetting"] == pytest.approx(found["general_nll"] - before["general_nll_before"])
    assert found["forgetting"] != 0
    with quantized(model, 2):
        assert found["accuracy_2bit"] == task.evaluate(model, tokenizer, ROWS)["accuracy"]
    assert {"accuracy_8bit", "nll_8bit", "ece_2bit", "ece_low", "nll_scaled"} <= set(found)


def test_every_glue_task_is_a_prompt(shared: Path) -> None:
    assert {name.removesuffix("-prompt") for name in PROMPTS} == set(GLUE)
    source = DataSource.find(shared / "data")
    for name, task in PROMPTS.items():
        data = task.load(source, (task.eval_split,))
        assert data.origins["general text"] == "mirror_wiki/random_10k.jsonl.gz"
        prompt = task.prompt(data.splits[task.eval_split][0])
        assert prompt.endswith(("Answer:", "Sentiment:")), name
        assert "{" not in prompt


def test_docstrings_need_no_data_folder() -> None:
    task = find_task("docstrings-prompt")
    data = task.load(DataSource())
    assert data.origins["general text"] == "topics of Python's help()"
    assert len(data.general) == task.general_rows
    plain = find_task("docstrings").load(DataSource())
    assert data.splits == plain.splits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{wrong} Answer:"}, r"task.template='{wrong} Answer:' must contain every column"),
        ({"template": "{text} Answer: "}, "without spaces at its ends"),
        ({"words": ("a", "a", "b")}, "duplicates"),
        ({"words": ("a", "b")}, "one for each of 3 classes"),
        ({"bits": (0,)}, "task.bits"),
        ({"pairing": "siamese", "text": ("a", "b")}, "do not exist for prompts"),
        ({"kind": "regression", "classes": (), "metrics": ("mse",), "words": ("low", "high")}, "must be numbers"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TASK, **options)


def test_classes_must_be_named(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"task.classes=\[0, 1, 2\]"):
        replace(TASK, classes=(), words=()).check({"train": ROWS}, {})
    with pytest.raises(DataError, match="does not distinguish"):
        replace(TASK, words=("日", "本", "語")).encode(ROWS, tokenizer)
    with pytest.raises(DataError, match="the tokens of '1' begin those of '10', which would never be predicted"):
        replace(TASK, words=("10", "2", "1")).encode(ROWS, tokenizer)
    with pytest.raises(DataError, match=r"task.general=/nowhere.txt: cannot be read"):
        replace(find_task("docstrings-prompt"), general="/nowhere.txt").load(DataSource())
