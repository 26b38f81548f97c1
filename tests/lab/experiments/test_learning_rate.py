"""The learning rate of a run that names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltasam.lab.experiments import ConfigError, preset_names, resolve, usual_learning_rate, with_learning_rate
from deltasam.lab.experiments._presets import load_preset
from helpers.folders import tiny_bert_folder


def test_larger_models_get_smaller_rates_and_adapters_larger_ones() -> None:
    sizes = [10**6, 22 * 10**6, 110 * 10**6, 350 * 10**6, 7 * 10**9]
    for lora in (False, True):
        rates = [usual_learning_rate(size, lora=lora) for size in sizes]
        assert rates == sorted(rates, reverse=True)
    assert all(usual_learning_rate(size, lora=True) > usual_learning_rate(size) for size in sizes)


def test_only_a_missing_rate_is_chosen(tmp_path: Path) -> None:
    sections = {"task": "rte", "model": str(tiny_bert_folder(tmp_path / "bert")), "optimizer": {"weight_decay": 0.1}}
    notes: list[str] = []
    found = with_learning_rate(sections, notes.append)
    assert found["optimizer"] == {"weight_decay": 0.1, "lr": 1e-4}
    assert len(notes) == 1
    assert with_learning_rate(found, notes.append) == found
    adapters = resolve(options=sections, settings=["model.lora=4"], note=notes.append)
    assert adapters.optimizer.lr == 5e-4
    assert len(notes) == 2
    assert "LoRA" in notes[1]


def test_a_model_of_unknown_size_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^model './nowhere': there is no such folder.*size.*optimizer\.lr"):
        resolve(options={"task": "rte", "model": "./nowhere"})
    assert resolve(options={"task": "rte", "model": "./nowhere"}, settings=["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_every_preset_names_its_rate() -> None:
    """So that the runs of a preset, and their ids, do not depend on the rule."""
    for name in preset_names():
        assert load_preset(name)[0]["optimizer"]["lr"], name
