"""Two processes under Trainer's DistributedDataParallel: the gradient of one process, and replicas that stay equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.data import REPOSITORY
from helpers.trainers import largest_difference

pytestmark = pytest.mark.slow


def run(folder: Path, processes: int) -> None:
    script = [str(REPOSITORY / "tests" / "helpers" / "ddp_run.py"), str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes > 1 else []
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    result = subprocess.run(
        [sys.executable, *launcher, *script],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_two_processes_are_one(tmp_path: Path) -> None:
    for processes in (1, 2):
        run(tmp_path, processes)
    for kind in (
        "bert",
        "t5",
    ):  # a mean over instances, and one over tokens of which the processes have different numbers
        one, two = (torch.load(tmp_path / f"{kind}-{n}.pt", weights_only=True) for n in (1, 2))
        assert largest_difference(one, two) < 1e-12
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found == {"between the processes": 0.0, "after a resume": 0.0}
