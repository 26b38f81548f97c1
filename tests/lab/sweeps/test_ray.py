"""A sweep on a Ray cluster of two nodes, with a worker killed in the middle: every run is there exactly once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.sweeps import Event, RayPool, Sweep, run_sweep
from helpers.folders import classification_task
from helpers.pretrained import bert_folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    source = Path(__file__).parents[3] / "src"
    here = [str(source), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 * 2**20}
    found = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    found.add_node(**size)
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()


def kill_one_worker() -> bool:
    """Kills a process that is making a run."""
    psutil = pytest.importorskip("psutil")
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command and command[0].startswith("ray::_remote"):
            process.send_signal(signal.SIGKILL)
            return True
    return False


def test_a_killed_worker_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    task = classification_task(tmp_path, rows=16)
    common = {"schedule": {"steps": 3}, "batch": {"size": 8}, "evaluate_every": "end", "checkpoint_every": 1}
    plain = {"tasks": [task], "models": [str(bert_folder(tmp_path / "bert"))], "common": common, "seeds": [1, 2, 3]}
    sweep = Sweep.from_plain({**plain, "methods": ["erm", "sam"]}, "test")
    events: list[Event] = []
    killed = []

    def watch(event: Event) -> None:
        events.append(event)
        if event.kind == "finished" and not killed and kill_one_worker():
            killed.append(event.run)

    outcome = run_sweep(sweep, tmp_path / "out", RayPool(address=cluster.address), watch=watch)
    assert killed
    assert outcome.failed == {}
    assert len(outcome.results) == 6
    finished = [event.run for event in events if event.kind == "finished"]
    assert len(finished) == len(set(finished)) == 6
    assert len(list((tmp_path / "out").glob("*/result.json"))) == 6
    assert any("died" in event.error for event in events if event.kind == "retried")
