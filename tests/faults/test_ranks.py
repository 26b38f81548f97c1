"""One of several processes is killed: all end with an error; the same command resumes to the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deltasam.lab.experiments import RunConfig
from helpers.data import REPOSITORY
from helpers.fault_runs import config
from helpers.trainers import assert_same_bits

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "fsdp": [
        "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "BertLayer",
        "--fsdp_state_dict_type", "FULL_STATE_DICT",
    ],
}  # fmt: skip


def launched(launcher: list[str], described: Path, output: Path, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    script = str(REPOSITORY / "tests" / "helpers" / "accelerate_run.py")
    return subprocess.run(
        [sys.executable, *launcher, script, "cli", "train", "--config", str(described), "--output", str(output)],
        env={**os.environ, "PYTHONPATH": paths, **quiet, **env},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_killed_process(kind: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    plain: dict[str, Any] = config(tmp_path / "parts").to_plain()
    plain["method"] = plain["method"] | {"scope": "global"}  # LookSAM: has a state, sharded where the weights are
    described = tmp_path / "config.yaml"
    described.write_text(RunConfig.from_plain(plain).to_yaml())
    launcher = LAUNCHERS[kind]

    whole = launched(launcher, described, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-4000:]
    wanted = load_file(tmp_path / "whole/model/model.safetensors")

    once = {"DELTASAM_KILL": f"1:8:{tmp_path / 'killed'}"}
    place = tmp_path / "run"
    killed = launched(launcher, described, place, **once)
    assert killed.returncode != 0
    assert "another process of the training has died" in killed.stderr, killed.stderr[-4000:]
    assert "resume from its last complete checkpoint" in killed.stderr
    assert not (place / "result.json").exists()
    assert (place / "checkpoints/checkpoint-6/complete.json").exists()

    again = launched(launcher, described, place, **once)
    assert again.returncode == 0, again.stderr[-4000:]
    assert_same_bits(load_file(place / "model/model.safetensors"), wanted)

    if kind == "ddp":  # or restarted by torchrun
        # With one store for all attempts, new processes find the addresses of dead ones: an issue of torch itself.
        restarting = {"DELTASAM_KILL": f"1:8:{tmp_path / 'killed again'}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = launched([*launcher, "--max-restarts", "1"], described, tmp_path / "alone", **restarting)
        assert done.returncode == 0, done.stderr[-4000:]
        assert (tmp_path / "killed again").exists()
        assert_same_bits(load_file(tmp_path / "alone/model/model.safetensors"), wanted)
