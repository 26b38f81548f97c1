"""Skipped updates: a fused optimizer that skips on the device does what the host would do."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer
from deltasam.lab.experiments import DivergedError, _guard
from deltasam.lab.experiments._guard import Guard, fused_optimizer
from deltasam.methods import SAM
from deltasam.objectives import Classification
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

NAN = float("nan")
CASES = {"first": ({0}, 1.0), "several": ({1, 2, 5}, 1.0), "unclipped": ({2}, 0.0)}


class Spoiled(Classification):
    """An objective that is not finite in some updates; SAM calls it twice per update."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        object.__setattr__(self, "bad", bad)
        object.__setattr__(self, "calls", [])

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        update = len(self.calls) // 2  # type: ignore[attr-defined]
        self.calls.append(update)  # type: ignore[attr-defined]
        return super().__call__(model, batch) * (NAN if update in self.bad else 1.0)  # type: ignore[attr-defined]


def trained(folder: Path, bad: set[int], *, guard: Guard | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the weights and the state of optimizer and schedule after seven updates."""
    model = fresh()
    settings = {"optim": "adamw_torch_fused", "weight_decay": 0.1, "max_steps": 7, "lr_scheduler_type": "linear"}
    trainer = MethodTrainer(
        model=model,
        args=arguments(folder, **(settings | options)),
        method=SAM(rho=0.05),
        objective=Spoiled(bad),
        train_dataset=classification_data(),
        callbacks=[guard or Guard(lambda: None)],
    )
    trainer.train()
    state = trainer.optimizer.state_dict()["state"]
    kept = {f"{number}/{name}": value for number, one in state.items() for name, value in one.items()}
    return trainer, {**weights(model), **kept, "lr": torch.tensor(trainer.lr_scheduler.get_last_lr())}


@pytest.mark.parametrize(("bad", "clip"), CASES.values(), ids=CASES)
def test_the_device_skips_what_the_host_would(
    bad: set[int], clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, on_device = trained(tmp_path, bad, max_grad_norm=clip)
    assert fused_optimizer(trainer.optimizer) is trainer.optimizer.optimizer
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")
    looped = trained(tmp_path, bad, max_grad_norm=clip, optim="adamw_torch", optim_args="foreach=False")[1]
    monkeypatch.setattr(_guard, "fused_optimizer", lambda _: None)
    on_host = trained(tmp_path, bad, max_grad_norm=clip)[1]
    assert_same_bits(on_device, on_host)
    assert largest_difference(on_device, looped) < 1e-5
    assert {int(value) for name, value in on_device.items() if name.endswith("/step")} == {7 - len(bad)}
    assert largest_difference(on_device, trained(tmp_path, set(), max_grad_norm=clip)[1]) > 1e-3


def test_the_host_checks_when_something_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, look = [], Guard._read_counts

    def spied(self: Guard, update: int) -> None:
        looks.extend([update] if self._counts is not None else [])
        look(self, update)

    monkeypatch.setattr(Guard, "_read_counts", spied)
    options = {"logging_strategy": "steps", "logging_steps": 4, "max_steps": 10}
    trained(tmp_path, {0, 1, 3}, guard=Guard(lambda: None, limit=3), **options)
    # At the limit: after update 3, and after 6 with a streak of one from update 4; log entries after 4 and 8; the end.
    assert looks == [3, 4, 6, 8, 10]
    logged = [record.getMessage() for record in caplog.records if record.name == _guard.__name__]
    assert [re.findall(r"\d+", message) for message in logged] == [["2", "1", "3"], ["1", "4", "4"]]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_short_run_without_any_update_has_diverged(optim: str, tmp_path: Path) -> None:
    """It ends before the limit, and its result would be that of the initial weights."""
    with pytest.raises(DivergedError, match="all 4 updates"):
        trained(tmp_path, set(range(4)), optim=optim, max_steps=4)
    trained(tmp_path, {0, 1, 2}, optim=optim, max_steps=4)


class Play:
    """A guard with updates, some with a gradient that is not finite, some followed by a save."""

    def __init__(self, *, fused: bool) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused, weight_decay=0.1)
        self.guard = Guard(lambda: Path("good"), limit=5)

    def update(self, step: int, *, bad: bool, due: str | None) -> tuple[bool, str | None]:
        """Returns whether a checkpoint is saved, and the error message if the run ended."""
        args, state = SimpleNamespace(world_size=1), SimpleNamespace(global_step=step)
        control = SimpleNamespace(**{f"should_{name}": name == due for name in ("log", "evaluate", "save")})
        for p in self.model.parameters():
            p.grad = torch.full_like(p, NAN if bad else 0.5)
        try:
            self.guard.on_pre_optimizer_step(args, state, control, model=self.model, optimizer=self.optimizer)
            self.optimizer.step()
            self.guard.on_optimizer_step(args, state, control)
            state.global_step += 1
            self.guard.on_step_end(args, state, control)
        except DivergedError as error:
            return False, str(error)
        self.optimizer.zero_grad()
        return control.should_save, None


@pytest.mark.parametrize("seed", range(20))
def test_the_run_ends_after_the_same_update_and_with_the_same_checkpoints(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    on_device = Play(fused=True)
    torch.manual_seed(seed)
    on_host = Play(fused=False)
    assert fused_optimizer(on_device.optimizer) is not None
    assert fused_optimizer(on_host.optimizer) is None
    ended = None
    for step in range(400):
        bad, due = chance.random() < 0.6, chance.choice([None] * 9 + ["log", "evaluate", "save"])
        saved, ended = on_device.update(step, bad=bad, due=due)
        assert (saved, ended) == on_host.update(step, bad=bad, due=due)
        assert not hasattr(on_device.optimizer, "found_inf")
        if ended is not None:
            break
    assert ended is not None
    assert "5 updates in a row" in ended
    # The loops and the fused kernel round differently.
    torch.testing.assert_close(on_device.model.weight, on_host.model.weight, rtol=0, atol=1e-5)


def test_which_optimizers_skip_steps_by_themselves() -> None:
    class Own(torch.optim.AdamW):
        pass

    params = list(nn.Linear(2, 2).parameters())
    for optimizer in (torch.optim.Adam(params, fused=True), torch.optim.SGD(params, lr=0.1, fused=True)):
        assert fused_optimizer(optimizer) is optimizer
        assert fused_optimizer(SimpleNamespace(optimizer=optimizer, scaler=None)) is optimizer
        assert fused_optimizer(SimpleNamespace(optimizer=optimizer, scaler=object())) is None
    for optimizer in (
        Own(params, fused=True),
        torch.optim.AdamW(params),
        torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
        torch.optim.Adagrad(params, fused=True),
        torch.optim.AdamW([*params, nn.Parameter(torch.ones(1, device="meta"))], fused=False),
    ):
        assert fused_optimizer(optimizer) is None


def test_no_checkpoint_at_the_end_of_an_epoch_either(tmp_path: Path) -> None:
    trained(tmp_path, {5}, max_steps=12, save_strategy="epoch")  # an epoch has six updates
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
