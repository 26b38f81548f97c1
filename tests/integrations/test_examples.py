"""The examples run and are correct."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import ERM, SAM, DeltaSAM
from helpers.data import REPOSITORY
from helpers.folders import WORDS, tiny_bert_folder
from helpers.trainers import assert_same_bits, largest_difference, weights

EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(folder)
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_accelerate_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra hf)")
    train = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))["train"]
    results = []
    for method in (ERM(), SAM(rho=0.0), DeltaSAM(rho=0.1)):
        torch.manual_seed(0)
        results.append(weights(train(method, epochs=1)))
    assert_same_bits(results[0], results[1])
    assert largest_difference(results[0], results[2]) > 1e-4
    assert_same_bits(results[0], plain_accelerate_loop())


def plain_accelerate_loop() -> dict[str, torch.Tensor]:
    """The same loop with ``accelerator.backward(loss)``, as in Accelerate's documentation."""
    from accelerate import Accelerator
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_hf_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"the {animal} sat on a {kind} mat,{int(kind == 'good')}" for animal in WORDS for kind in ("good", "bad")]
    for file in ("train.csv", "test.csv"):
        (tmp_path / file).write_text("text,label\n" + "\n".join(rows))
    model = tiny_bert_folder(tmp_path / "model")
    found = run("hf_trainer.py", str(model), "train.csv", "test.csv", monkeypatch=monkeypatch, folder=tmp_path)
    assert any("sharpness" in entry for entry in found["trainer"].state.log_history)
    assert "eval_accuracy" in capsys.readouterr().out


def test_sentence_embeddings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra sts)")
    (tmp_path / "sentences.txt").write_text("\n".join(f"the {a} sat under a {b}" for a in WORDS[:4] for b in WORDS))
    model = tiny_bert_folder(tmp_path / "model")
    found = run("sentence_embeddings.py", str(model), "sentences.txt", monkeypatch=monkeypatch, folder=tmp_path)
    assert any("sharpness" in entry for entry in found["trainer"].state.log_history)
    assert (tmp_path / "runs" / "sentence_embeddings" / "model" / "modules.json").is_file()
