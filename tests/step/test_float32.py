"""``full_float32`` disables TF32, and restores the settings of the user, made in either of torch's two ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasam.step import float32
from deltasam.step.float32 import full_float32, rounded
from deltasam.step.passes import Passes
from deltasam.weighting._finite_difference import exact
from helpers import float32_settings
from helpers.float32_settings import NEW, WAYS
from helpers.problems import CNN, TRANSFORMER

CUDA = torch.device("cuda")
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """The answers of all processes by way of setting."""
    script = Path(float32_settings.__file__)
    path = os.pathsep.join([str(script.parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:deltasam", str(script)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def answer(answers: Answers, way: str, question: str) -> Any:
    found = answers[way][question]
    assert not (isinstance(found, dict) and "error" in found), found["error"]
    return found


AFTER = ["after cuda", "after cpu", "after an error", "after blocks in blocks", "after a run", "kept"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("question", AFTER)
def test_the_settings_are_restored(answers: Answers, way: str, question: str) -> None:
    assert answer(answers, way, question) == answer(answers, way, "untouched")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_inside_nothing_is_rounded(answers: Answers, way: str, device: str) -> None:
    found, before = answer(answers, way, f"inside {device}"), answer(answers, way, "untouched")[0]
    assert found["rounded"] == []
    if NEW:
        backend = {"cuda": "cuda", "cpu": "mkldnn"}[device]
        assert {found["getters"][f"{backend} {op}"] for op in ("matmul", "conv", "rnn")} <= {"ieee", "none"}
    if device == "cuda" and way != "new everything bf16":  # which does not affect a CUDA device
        assert found["getters"]["precision"] == "highest"  # torch.compile reads the older setting, too (torch 2.10)
        assert found["getters"]["products"] is False
        if found["getters"]["convolutions"] == "raises":  # torch's default cannot be restored, so it was not changed
            assert before["convolutions"] == "raises" or not way.startswith(("forbidden", "allowed both"))


@pytest.mark.parametrize("way", WAYS)
def test_steps_analyses_and_keys_work(answers: Answers, way: str) -> None:
    found = answer(answers, way, "works")["rounded"]
    untouched = answer(answers, way, "untouched")[0]
    if NEW:
        assert found == sorted(op for op in ("matmul", "conv", "rnn") if untouched[f"cuda {op}"] == "tf32")
    elif untouched["products"]:
        assert "matmul" in found


def test_a_torch_with_only_the_older_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        products = "medium"

    class Cudnn:
        allow_tf32 = True

    monkeypatch.setattr(float32, "HAS_FP32_PRECISION", False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: Torch.products)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: setattr(Torch, "products", value))
    monkeypatch.setattr(torch.backends, "cudnn", Cudnn)
    assert rounded(CUDA) == {"matmul", "conv", "rnn"}
    assert rounded(torch.device("cpu")) == {"matmul"}
    with full_float32(CUDA):
        assert (Torch.products, Cudnn.allow_tf32) == ("highest", False)
        assert rounded(CUDA) == frozenset()
    assert (Torch.products, Cudnn.allow_tf32) == ("medium", True)


@pytest.mark.parametrize(("make", "kinds", "differs"), [
    (TRANSFORMER.make, {"conv", "rnn"}, False), (TRANSFORMER.make, {"matmul"}, True),
    (CNN.make, {"conv", "rnn"}, True), (CNN.make, set(), False),
    (lambda dtype: (nn.LSTM(2, 2), torch.zeros(1, 2), None), {"rnn"}, True),
])  # fmt: skip
def test_an_extra_forward_only_if_the_model_is_rounded(
    make: Callable[..., Any], kinds: set[str], differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN rounds convolutions by default, which does not matter for a model without any."""
    model, batch, objective = make(torch.float32)
    monkeypatch.setattr("deltasam.weighting._finite_difference.rounded", lambda device: frozenset(kinds))
    passes = Passes(model, batch, objective)
    with exact(passes, True) as sharpened:
        assert sharpened is differs
    with exact(passes, False) as sharpened:
        assert not sharpened


def test_under_autocast_nothing_is_set_for_a_model_that_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    set_for: list[torch.device] = []

    def watched(device: torch.device) -> Any:
        set_for.append(device)
        return full_float32(device)

    monkeypatch.setattr("deltasam.weighting._finite_difference.full_float32", watched)
    monkeypatch.setattr("deltasam.weighting._finite_difference.rounded", lambda device: frozenset({"conv", "rnn"}))
    for problem, times in ((TRANSFORMER, 0), (CNN, 1)):
        passes = Passes(*problem.make(torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16), exact(passes, True) as sharpened:
            assert sharpened
            assert not torch.is_autocast_enabled("cpu")
        assert len(set_for) == times
