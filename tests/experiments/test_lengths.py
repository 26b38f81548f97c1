"""Texts that are longer than the model's table of positions: told before the training, not in the middle of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from deltasam.experiments import ConfigError, RunConfig, load, run
from deltasam.experiments._lengths import positions
from helpers.pretrained import bert_folder

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
def test_what_the_model_has_no_position_for(tmp_path: Path, texts: dict[str, Any], split: str, length: int) -> None:
    one = config(tmp_path, **texts)
    told = rf"task.max_length=\d+: {split} has texts of {length} tokens, .* 160; set task.max_length=160"
    with pytest.raises(ConfigError, match=told):
        run(one, tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=told):
        load(one, split=split)


def test_short_texts_may_have_any_limit(tmp_path: Path) -> None:
    assert run(config(tmp_path, train="short", validation="short", max_length=512), tmp_path / "run").steps == 1


@pytest.mark.parametrize(
    ("made", "most"),
    [
        (hf.BertConfig(num_hidden_layers=1), 512),
        (hf.RobertaConfig(num_hidden_layers=1, max_position_embeddings=514), 512),
        (hf.BartConfig(encoder_layers=1, decoder_layers=1), 1024),
        (hf.GPT2Config(n_layer=1), 1024),
        (hf.T5Config(num_layers=1), None),  # relative positions have no end
        (hf.LlamaConfig(num_hidden_layers=1, vocab_size=50), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_positions_of_a_model(made: hf.PretrainedConfig, most: int | None) -> None:
    with torch.device("meta"):
        assert positions(hf.AutoModel.from_config(made)) == most
