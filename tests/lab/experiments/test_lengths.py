"""Texts that are longer than the model's table of positions are reported before the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from deltasam.lab.experiments import ConfigError, RunConfig, load, run
from deltasam.lab.experiments._lengths import check_lengths, positions
from deltasam.lab.tasks import DataError, Seq2SeqTask
from helpers.pretrained import bart_folder, bert_folder, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
LONG = "the " * 300  # 302 tokens; the model has 160 positions


def config(folder: Path, *, train: str, validation: str, **task: Any) -> RunConfig:
    files = {}
    for name, text in (("train", train), ("validation", validation)):
        files[name] = str(folder / f"{name}.csv")
        Path(files[name]).write_text(f"text,label\n{text},1\na dog ran,0\n")
    own = {"name": "classification", "files": files, **task}
    sections: dict[str, Any] = {"schedule": {"steps": 1}, "batch": {"size": 2}, "checkpoint_every": "never"}
    return RunConfig.from_plain({"task": own, "model": str(bert_folder(folder / "bert")), **sections})


@pytest.mark.parametrize(
    ("texts", "split", "length"),
    [
        ({"train": LONG, "validation": "short", "max_length": 512}, "train", 302),
        ({"train": "short", "validation": LONG, "max_length": 512}, "validation", 302),
        ({"train": "short", "validation": "short", "max_length": 161, "pad_to_max_length": True}, "train", 161),
    ],
)
def test_texts_longer_than_the_positions(tmp_path: Path, texts: dict[str, Any], split: str, length: int) -> None:
    one = config(tmp_path, **texts)
    message = rf"task.max_length=\d+: {split} has texts of {length} tokens, .* 160; set task.max_length=160"
    with pytest.raises(ConfigError, match=message):
        run(one, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # the corrected run may use this folder
    with pytest.raises(ConfigError, match=message):
        load(one, split=split)


@pytest.mark.parametrize(
    ("text", "pairing", "least"), [(["a"], "joint", 3), (["a", "b"], "joint", 5), (["a", "b"], "siamese", 3)]
)
def test_special_tokens_leave_no_room_for_text(tmp_path: Path, text: list[str], pairing: str, least: int) -> None:
    """Below the number of special tokens, tokenizers do not truncate; at that number, all texts are equal."""
    (tmp_path / "rows.csv").write_text("a,b,label\na cat sat,on it,1\na dog ran,to it,0\n")
    own = {"files": dict.fromkeys(("train", "validation"), str(tmp_path / "rows.csv")), "text": text}
    for length in range(1, least + 1):
        task = {"name": "classification", **own, "pairing": pairing, "max_length": length}
        steps = {"schedule": {"steps": 1}, "checkpoint_every": "never"}
        one = RunConfig.from_plain({"task": task, "model": str(bert_folder(tmp_path / "bert")), **steps})
        if length == least:
            assert load(one).rows
            continue
        message = rf"task.max_length={length}: .* special tokens.* set task.max_length={least} or more"
        with pytest.raises(ConfigError, match=message):
            run(one, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("length", "message"),
    [(2, "special tokens.* set task.max_target_length=3 or more"), (200, "the model's positions end at 160")],
)
def test_summaries_too_short_for_a_word_or_too_long_for_the_decoder(length: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"source": "the file", "target": "the name"}\n' * 2)
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "rows.jsonl"))
    task = {"name": "seq2seq", "files": files, "max_target_length": length}
    one = RunConfig.from_plain({"task": task, "model": str(bart_folder(tmp_path / "bart"))})
    with pytest.raises(ConfigError, match=rf"task.max_target_length={length}: .*{message}"):
        run(one, tmp_path / "run")


def test_encoder_and_decoder_have_different_positions() -> None:
    """LED reads 16384 tokens and writes 1024."""
    sides = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32}
    with torch.device("meta"):
        led = hf.LEDForConditionalGeneration(hf.LEDConfig(encoder_layers=1, decoder_layers=1, **sides))
    rows = [{"source": LONG, "target": "the name"}]
    task = Seq2SeqTask(name="own", source="source", target="target", max_length=60, max_target_length=32)
    check_lengths(task, led, tokenizer(), {"train": rows})
    with pytest.raises(ConfigError, match=r"task.max_length=100: train has texts of 100 tokens, .* 64;"):
        check_lengths(replace(task, max_length=100), led, tokenizer(), {"train": rows})
    with pytest.raises(ConfigError, match=r"task.max_target_length=33: the model's positions end at 32"):
        check_lengths(replace(task, max_target_length=33), led, tokenizer(), {"train": rows})


def test_a_model_that_does_not_fit_leaves_no_folder(tmp_path: Path) -> None:
    one = config(tmp_path, train="short", validation="short")
    adapters = RunConfig.from_plain({**one.to_plain(), "method": {"name": "SAM", "params": "lora"}})
    with pytest.raises(ConfigError, match="lora"):
        run(adapters, tmp_path / "run")
    (tmp_path / "bert/model.safetensors").write_bytes(b"cut short")
    with pytest.raises(DataError, match="could not be loaded"):
        run(one, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_short_texts_may_have_any_limit(tmp_path: Path) -> None:
    assert run(config(tmp_path, train="short", validation="short", max_length=512), tmp_path / "run").steps == 1


@pytest.mark.parametrize(
    ("made", "most"),
    [
        (hf.BertConfig(num_hidden_layers=1), 512),
        (hf.RobertaConfig(num_hidden_layers=1, max_position_embeddings=514), 512),
        (hf.BartConfig(encoder_layers=1, decoder_layers=1), 1024),
        (hf.GPT2Config(n_layer=1), 1024),
        (hf.T5Config(num_layers=1), None),  # relative positions
        (hf.LlamaConfig(num_hidden_layers=1, vocab_size=50), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_positions_of_a_model(made: hf.PretrainedConfig, most: int | None) -> None:
    with torch.device("meta"):
        assert positions(hf.AutoModel.from_config(made)) == most
