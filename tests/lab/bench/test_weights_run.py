"""``benchmarks/weights_run.py`` and ``weights_steps.py``: measurements of delta-SAM's weights on trained models."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helpers.data import REPOSITORY
from helpers.pretrained import bert_folder

SWEEP = """
tasks: [{{name: docstrings, train_rows: 24, eval_rows: 20}}]
models: [{model}]
methods:
  sam: {{method: {{name: SAM, rho: 0.05}}, schedule: {{steps: 1}}}}
seeds: [1]
common: {{batch: {{size: 8}}, evaluate_every: end, checkpoint_every: never}}
keep: weights
"""
pytestmark = pytest.mark.usefixtures("libraries_speak_again")


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "benchmarks" / "weights_run.py"), run_name="weights_run")


@pytest.fixture
def steps() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "benchmarks" / "weights_steps.py"), run_name="weights_steps")


@pytest.mark.slow
def test_models_and_measurements(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sweep = tmp_path / "tiny.yaml"
    sweep.write_text(SWEEP.format(model=bert_folder(tmp_path / "bert")))
    words = ["--device", "cpu", "--rows", "4", "--batch-size", "2", "--sweep", str(sweep)]
    words += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    measure = script["main"].__globals__["measure"]

    def not_by_derivatives(name: str, *rest: Any) -> Any:
        if name == "weights by derivatives":
            raise RuntimeError("CUDA out of memory. Tried to allocate\na lot")
        return measure(name, *rest)

    monkeypatch.setitem(script["main"].__globals__, "measure", not_by_derivatives)
    script["main"](words)
    output = capsys.readouterr().out
    assert "sam, weights by derivatives: failed after" in output
    assert "Tried to allocate\n" in output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sam.json"]

    monkeypatch.setitem(script["main"].__globals__, "measure", measure)
    script["main"](words)
    output = capsys.readouterr().out
    assert "sam, weights by derivatives:" in output
    assert "alignment" not in output  # it exists already
    text = (tmp_path / "out" / "sam.json").read_text()
    assert str(tmp_path) not in text
    record = json.loads(text)
    assert (record["method"], record["updates"], record["rows"]) == ("SAM", 1, 4)
    assert record["measurements"].keys() == script["MEASUREMENTS"].keys()
    lines = [line for found in record["measurements"].values() for line in found["lines"]]
    assert {len(values) for line in lines for values in line["by_batch"].values()} == {2}
    assert {line["method"] for line in lines if "method" in line} >= {"SAM", "DeltaSAM FiniteDifference(samples=8)"}

    script["main"](words)
    assert "sam: nothing is missing" in capsys.readouterr().out
    words[3] = "2"
    script["MEASUREMENTS"].clear()
    script["main"](words)
    assert "has other settings; it is replaced" in capsys.readouterr().out


def test_estimators_by_name(script: dict[str, Any]) -> None:
    from deltasam.weighting import FiniteDifference, OwnGradient

    assert script["weighting"]("FiniteDifference(radius=0.5, samples=2)") == FiniteDifference(radius=0.5, samples=2)
    assert script["weighting"]("OwnGradient") == OwnGradient()


def test_an_unknown_model(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script["main"](["--models", "smart"])
    assert "--models smart: the sweep has erm-20, " in capsys.readouterr().err


def test_the_command_is_that_of_the_repository(script: dict[str, Any]) -> None:
    sweep = REPOSITORY / "configs" / "sweeps" / "evidence" / "weights-cola.yaml"
    options = Namespace(rows=48, batch_size=8, device="cpu", sweep=sweep, out=script["OUT"])
    assert script["command_of"](options) == (
        "python benchmarks/weights_run.py --rows 48 --batch-size 8 --sweep configs/sweeps/evidence/weights-cola.yaml "
        "--device cpu"
    )
    options.sweep, options.out = script["SWEEP"], Path("/elsewhere/out")
    assert script["command_of"](options).endswith("--batch-size 8 --out out --device cpu")


def test_the_models_of_the_page(script: dict[str, Any]) -> None:
    from deltasam.lab.sweeps import final_runs, read_sweep

    configs = [run.config for run in final_runs(read_sweep(script["SWEEP"]), {})]
    assert sorted((type(config.method).__name__, config.schedule.steps) for config in configs) == [
        ("ERM", 20),
        ("ERM", 60),
        ("ERM", 114),
        ("ERM", 342),
        ("SAM", 342),
    ]


def test_the_mean_weight_of_each_label(steps: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    batches = [{"x": torch.randn(8, 4), "labels": torch.arange(8) % 2} for _ in range(3)]
    found = steps["by_label"](
        model, batches, lambda model, b: cross_entropy(model(b["x"]), b["labels"], reduction="none")
    )["weightings"]
    assert set(found) == set(steps["WEIGHTINGS"])
    for lines in found.values():
        assert len(lines["with_loss"]) == 3
        assert all(-1 <= value <= 1 for value in lines["with_loss"])
        for one, other in zip(lines["by_label"]["0"], lines["by_label"]["1"], strict=True):
            assert (one + other) / 2 == pytest.approx(1)  # half of the batch each, and the mean weight is 1


def test_eta_is_reached_as_the_differences_predict(steps: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([1e-3, 2e-3, 3e-2, 1.0], dtype=torch.float64)
    found = steps["by_eta"](model, [{"x": x}], lambda model, b: (model(b["x"][:, None])[:, 0] - 1) ** 2 / 2)["eta"]
    # One weight, so r is rho or -rho, and with e = w x - 1 the first difference of (w x - 1)^2 / 2 is 2 rho |e x|.
    errors = (model.weight.detach()[0, 0] * x - 1).abs()
    for rho, lines in found.items():
        difference = 2 * float(rho) * errors * x
        for eta, line in lines.items():
            assert line["floor"] == [pytest.approx(float((difference < float(eta)).double().mean()))]
            assert line["cosine"] == [pytest.approx(1)], "of one weight"
    shares = [line["floor"][0] for lines in found.values() for line in lines.values()]
    assert len(set(shares)) > 1


def test_a_larger_eta_turns_the_update(steps: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    batches = [{"x": torch.randn(8, 4).double(), "labels": torch.arange(8) % 2} for _ in range(2)]
    found = steps["by_eta"](
        model, batches, lambda model, b: cross_entropy(model(b["x"]), b["labels"], reduction="none")
    )["eta"]
    assert found["0.01"]["0.0001"]["cosine"] == pytest.approx([1, 1])
    assert 0 < min(found["0.01"]["0.001"]["cosine"]) < 1 - 1e-9
    assert all(p.grad is None for p in model.parameters())
