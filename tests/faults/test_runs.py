"""Runs that are killed, stopped, out of disk space, or resumed from damaged checkpoints."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltasam.integrations.storage import seal, sealed
from deltasam.lab.experiments import DivergedError, RunConfig, RunFolder, run
from deltasam.lab.experiments._folder import COMPLETE
from deltasam.lab.experiments._trainer import RunTrainer
from helpers.data import REPOSITORY
from helpers.fault_runs import Interrupted, config, interrupt_at

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


def launched(*command: str, timeout: int = 1800) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    env = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def faults(folder: Path, kills: int) -> dict[str, Any]:
    result = launched(str(REPOSITORY / "tests" / "helpers" / "fault_runs.py"), str(folder), str(kills))
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_killed_stopped_and_starved_runs_end_like_an_undisturbed_one(tmp_path: Path) -> None:
    found = faults(tmp_path, 3)
    assert found["hit"] == 3
    assert set(found["killed"]) == {found["whole"]}
    for name in ("SIGTERM", "SIGINT"):
        one = found[name]
        assert (one["code"], one["finished"], one["checkpoint"]) == (75, False, True)
        assert f"stopped by {name} after update 5 of 12" in one["output"]
        assert "Traceback" not in one["output"]
        assert one["weights"] == found["whole"]
    assert found["starved"]["code"] == 1
    assert "last complete checkpoint" in found["starved"]["output"]
    assert "Traceback" not in found["starved"]["output"]
    assert found["starved"]["weights"] == found["whole"]


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    found = faults(tmp_path, 20)
    assert found["hit"] == 20
    assert set(found["killed"]) == {found["whole"]}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return config(tmp_path_factory.mktemp("parts"))


def interrupted(one: RunConfig, folder: Path, at: int) -> None:
    with pytest.raises(Interrupted):
        run(one, folder, watch=interrupt_at(at))


def steps_of_resumed(one: RunConfig, folder: Path) -> list[int]:
    seen: list[int] = []
    run(one, folder, watch=lambda step, total, latest: seen.append(step))
    return seen


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "mark"])
def test_damaged_checkpoint_is_skipped(
    one: RunConfig, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    interrupted(one, folder, at=7)  # checkpoints at 4 and 6
    last = folder / "checkpoints/checkpoint-6"
    victim = last / ("complete.json" if damage == "mark" else "optimizer.pt")
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "bit":
        victim.write_bytes(content[:500] + bytes([content[500] ^ 4]) + content[501:])
    else:
        victim.write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.WARNING):
        assert steps_of_resumed(one, folder)[0] == 5
    assert "the checkpoint before it is used" in caplog.text
    assert str(victim) in caplog.text
    assert RunFolder(folder).result.is_file()


def test_checkpoint_runs_no_code(one: RunConfig, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "ran").write_text, ("x",))

    folder = tmp_path / "run"
    interrupted(one, folder, at=7)
    last = folder / "checkpoints/checkpoint-6"
    notes = sealed(last, COMPLETE)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (last / name).write_bytes(pickle.dumps(Evil()))
    seal(last, COMPLETE, notes)  # by an attacker
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        run(one, folder)
    assert not (tmp_path / "ran").exists()


def test_diverged_run_ends_and_names_the_checkpoint(
    one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = one.to_plain() | {"schedule": {"steps": 60}}
    step, calls = RunTrainer.training_step, 0

    def training_step(self: Any, model: torch.nn.Module, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = step(self, model, *args)
        if calls > 5:
            model.get_input_embeddings().weight.grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", training_step)
    with pytest.raises(DivergedError, match=r"25 updates in a row, up to update 30;.*good.*checkpoint-4\."):
        run(RunConfig.from_plain(plain), tmp_path / "run")


def test_an_update_that_is_not_finite_is_skipped() -> None:
    from types import SimpleNamespace

    from deltasam.lab.experiments._guard import Guard

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    guard, state = Guard(lambda: None, limit=3), SimpleNamespace(global_step=7)
    before = [p.detach().clone() for p in model.parameters()]

    def update(value: float) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        guard.on_pre_optimizer_step(None, state, None, model=model)
        optimizer.step()

    update(float("nan"))
    update(float("inf"))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
    update(1.0)  # ends the streak
    assert not torch.equal(model.weight, before[0])
    update(float("nan"))
    update(float("nan"))
    with pytest.raises(DivergedError, match="there is no checkpoint yet"):
        update(float("nan"))


@pytest.mark.slow
def test_torchrun_two_processes(tmp_path: Path) -> None:
    """``deltasam train`` makes the same run in two processes: DDP by ``torchrun``, FSDP2 by ``accelerate launch``."""
    (tmp_path / "parts").mkdir()
    plain = config(tmp_path / "parts").to_plain() | {"method": {"name": "SAM", "scope": "global"}}
    plain["model"] = plain["model"] | {"dropout": 0.0}
    described = tmp_path / "config.yaml"
    described.write_text(RunConfig.from_plain(plain).to_yaml())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "deltasam"]
    script = str(REPOSITORY / "tests" / "helpers" / "accelerate_run.py")
    accelerate = [
        "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--fsdp_transformer_layer_cls_to_wrap", "BertLayer", "--fsdp_state_dict_type", "FULL_STATE_DICT",
        script, "cli",
    ]  # fmt: skip
    places = {"one": ["-m", "deltasam"], "two": torchrun, "sharded": accelerate}
    for place, words in places.items():
        result = launched(*words, "train", "--config", str(described), "--output", str(tmp_path / place))
        assert result.returncode == 0, result.stderr[-4000:]
    one, *others = (load_file(tmp_path / place / "model/model.safetensors") for place in places)
    first, *rest = ([json.loads(line) for line in (tmp_path / place / "metrics.jsonl").open()] for place in places)
    for other, log in zip(others, rest, strict=True):
        # The bias of the keys does not matter to a softmax: its gradient is rounding, which Adam makes large.
        apart = {name: float((one[name] - other[name]).abs().max()) for name in one if not name.endswith("key.bias")}
        assert max(apart.values()) < 1e-4, max(apart, key=lambda name: apart[name])
        losses = [[entry["loss"] for entry in entries if "loss" in entry] for entries in (first, log)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
