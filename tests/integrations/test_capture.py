"""``capture=True`` in the Trainer: the same run on the CPU; graphs are used and shared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from deltasam.integrations import MethodTrainer
from deltasam.integrations._accumulation import Scale
from deltasam.methods import SAM, DeltaSAM, Method
from deltasam.speed.capture import _captured
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, weights


def trained(folder: Path, method: Method, *, capture: bool, **options: Any) -> tuple[MethodTrainer, dict[str, Any]]:
    model = fresh()
    args = arguments(folder, **options)
    data = classification_data()
    trainer = MethodTrainer(model=model, args=args, method=method, capture=capture, train_dataset=data)
    trainer.train()
    return trainer, weights(model)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_on_the_cpu_it_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer, captured = trained(tmp_path / "captured", DeltaSAM(), capture=True, **options)
    _, ordinary = trained(tmp_path / "ordinary", DeltaSAM(), capture=False, **options)
    assert_same_bits(captured, ordinary)
    assert trainer.captured is not None
    assert trainer.captured.report.ordinary > 0
    assert trainer.captured.report.obstacles == {}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_steps_of_a_run_share_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    class Played:
        """A fake graph."""

        placed: tuple[str, ...] = ()

        def __init__(self, run: Any, *_: Any) -> None:
            self.run = run

        def replay(self, inputs: Any, steps: int) -> Any:
            return self.run(inputs)

    monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    monkeypatch.setattr(_captured, "Pool", SimpleNamespace)
    monkeypatch.setattr(_captured, "RecordedStep", Played)
    trainer, _ = trained(tmp_path, SAM(), capture=True, gradient_accumulation_steps=accumulation)
    report = trainer.captured.report
    assert (report.ordinary, report.recorded) == (1, 1)
    assert report.replayed == 6 * accumulation - 1


@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_a_callback_changes_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    recorded = []

    class Played:
        """A fake graph with the radius of its recording."""

        placed: tuple[str, ...] = ()

        def __init__(self, run: Any, *_: Any) -> None:
            recorded.append(trainer.method.rho)
            self.run = run

        def replay(self, inputs: Any, steps: int) -> Any:
            return self.run(inputs)

    class WarmUp(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.method = trainer.method.replace(rho=0.05 if same or state.global_step >= 3 else 0.0)

    monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    monkeypatch.setattr(_captured, "Pool", SimpleNamespace)
    monkeypatch.setattr(_captured, "RecordedStep", Played)
    args, data = arguments(tmp_path), classification_data()
    trainer = MethodTrainer(
        model=fresh(), args=args, method=SAM(), capture=True, train_dataset=data, callbacks=[WarmUp()]
    )
    trainer.train()
    assert trainer.forwards == (12 if same else 3 + 2 * 3)
    assert trainer.method.steps == 6
    assert recorded == ([0.05] if same else [0.0, 0.05])


def test_the_factor_of_a_recorded_step_is_a_number_or_a_tensor() -> None:
    device = torch.device("cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert Scale(0.5, None).fixed(device) == 0.5
    assert float(Scale(0.5, scaler).fixed(device)) == 4.0
    share = torch.tensor(0.25, dtype=torch.float64)
    assert Scale(share, None).fixed(device) is share
