"""Two processes under Trainer, Accelerate and Lightning, DDP and FSDP2: the weights of one process, equal replicas.

Launched by ``torchrun`` and by ``accelerate launch``. Accelerate's FSDP wants a GPU; see ``helpers/fsdp_on_cpu.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from packaging.version import Version

from helpers.data import REPOSITORY
from helpers.trainers import largest_difference

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [
    "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip


needs_fsdp2 = pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.6"), reason="this version of accelerate does not know FSDP2"
)


def launch(launcher: list[str], script: str, *words: str) -> None:
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(
        [sys.executable, *launcher, str(REPOSITORY / "tests" / "helpers" / script), *words],
        env={**os.environ, "PYTHONPATH": paths, **quiet},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def loaded(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = torch.load(path, weights_only=True)
    return found


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    for launcher in ([], TORCHRUN):
        launch(launcher, "ddp_run.py", str(tmp_path))
    for kind in (
        "bert",
        "t5",
    ):  # a mean over instances, and one over tokens, whose number differs between processes
        one, two = (torch.load(tmp_path / f"{kind}-{n}.pt", weights_only=True) for n in (1, 2))
        assert largest_difference(one, two) < 1e-12
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found == {"between the processes": 0.0, "after a resume": 0.0}


@needs_fsdp2
@pytest.mark.slow
def test_accelerate_launch_of_a_plain_loop(tmp_path: Path) -> None:
    cases = {"ddp-loop": "DistributedDataParallel", "fsdp-loop": "FSDPSequential"}
    launch(ACCELERATE, "accelerate_run.py", str(tmp_path), *cases)
    for case, kind in cases.items():
        found = loaded(tmp_path / f"{case}-2.pt")
        assert found["kind"] == kind
        assert largest_difference(found["one"], found["all"]) < 1e-10


@pytest.mark.slow
def test_accelerate_launch_of_the_trainer(tmp_path: Path) -> None:
    cases = ("ddp-trainer", "fsdp-trainer")
    for launcher in ([], ACCELERATE):
        launch(launcher, "accelerate_run.py", str(tmp_path), *cases)
    for case in cases:
        one, two = (loaded(tmp_path / f"{case}-{n}.pt") for n in (1, 2))
        wrong = {name: largest_difference(one[name], two[name]) for name in one}
        assert max(wrong.values()) < 1e-10, (case, wrong)
    assert two["resumed"] == 0.0  # from a sharded checkpoint, bit for bit


@pytest.mark.slow
def test_the_lightning_example(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed (extra lightning)")
    launch(TORCHRUN, "lightning_run.py", str(tmp_path))
    first, second = (loaded(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name in first:
        assert largest_difference(first[name], second[name]) == 0.0, name
    assert largest_difference(first["erm"], first["plain"]) < 1e-6
    assert largest_difference(first["sam"], first["plain"]) > 1e-4
    assert largest_difference(first["closure"], first["sam"]) < 1e-6
    assert largest_difference(first["closure global"], first["sam global"]) < 1e-6
    assert largest_difference(first["sam"], first["sam global"]) > 1e-4
