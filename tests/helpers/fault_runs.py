"""Runs that are killed, stopped, or out of disk space. A script: it imports everything once and forks every run.

``fault_runs.py FOLDER KILLS`` writes its findings to ``found.json``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sklearn.metrics  # noqa: F401 - imported once, for all runs
import torch
import tqdm.auto
import tqdm.std
import transformers.trainer  # noqa: F401

import deltasam.lab.cli.train  # noqa: F401
from deltasam.lab.cli import main
from deltasam.lab.experiments import RunConfig, run
from deltasam.lab.experiments._callbacks import Recorder  # noqa: F401
from deltasam.lab.experiments._guard import Guard  # noqa: F401
from deltasam.lab.experiments._trainer import RunTrainer
from helpers.pretrained import bert_folder

UPDATES = 12


class Interrupted(BaseException):
    """Like a kill: no handler catches it."""


def interrupt_at(at: int) -> Callable[[int, int, dict[str, float]], None]:
    """Returns a ``watch`` that interrupts the run after this update."""

    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        if step == at:
            raise Interrupted

    return watch


def rows(path: Path, number: int, seed: int) -> str:
    """Writes sentences whose first word determines the label."""
    words, chance = ("return", "file", "name", "set", "get", "the"), random.Random(seed)
    made = [" ".join(chance.choices(words, k=5)) for _ in range(number)]
    path.write_text("\n".join(["text,label", *(f"{text},{int(text < 'name')}" for text in made)]))
    return str(path)


def config(folder: Path) -> RunConfig:
    bert = str(bert_folder(folder / "bert"))
    files = {"train": rows(folder / "train.csv", 48, 0), "validation": rows(folder / "validation.csv", 10, 1)}
    return RunConfig.from_plain(
        {
            "task": {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 16},
            "model": bert,
            "method": {"name": "LookSAM", "k": 4},  # has a state to be saved
            "optimizer": {"lr": 1e-3},
            "schedule": {"steps": UPDATES},
            "batch": {"size": 8},
            "evaluate_every": "end",
            "checkpoint_every": 2,
        }
    )


def forked(work: Callable[[], int]) -> int:
    """Starts the work in a new process."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            # The lock of progress bars is shared with the parent: a child that is killed while it holds the lock would
            # block every later one.
            for bars in (tqdm.std.tqdm, tqdm.auto.tqdm):
                bars.set_lock(threading.RLock())
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(one: RunConfig, folder: Path) -> int:
    run(one, folder)
    return 0


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


def kills(one: RunConfig, folder: Path, number: int, seconds: float) -> tuple[int, list[str]]:
    """Sends SIGKILL at random moments until ``number`` kills have hit; a run that finishes is followed by another one.

    Returns:
        The number of kills that hit a live run, and the weights of all runs.
    """
    chance, hit, place = random.Random(number), 0, folder / "0"
    ends = []
    while hit < number:
        child = forked(lambda place=place: finish(one, place))
        until = time.monotonic() + chance.uniform(0.1, 1.0) * seconds
        alive = True
        while alive and time.monotonic() < until:
            alive = os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.005)
        if alive:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            hit += 1
        if (place / "result.json").exists():
            ends.append(weights(place))
            place = folder / str(len(ends))
    assert ended(forked(lambda: finish(one, place))) == 0
    return hit, [*ends, weights(place)]


def stopped(bert_config: Path, folder: Path, number: int) -> tuple[int, str]:
    """Returns exit code and message of a ``deltasam train`` that gets a signal in the middle of an update."""
    log = folder.with_suffix(".log")

    def work() -> int:
        calls = 0
        step = RunTrainer.training_step

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                os.kill(os.getpid(), number)
            return step(self, *args, **kwargs)

        RunTrainer.training_step = training_step
        with log.open("w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
            return main(["train", "--config", str(bert_config), "--output", str(folder)])

    return ended(forked(work)), log.read_text()


def starved(bert_config: Path, folder: Path) -> tuple[int, str]:
    """Returns the same for a process whose files must be smaller than those of a checkpoint."""
    log = folder.with_suffix(".log")

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with log.open("w") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(io.StringIO()):
            return main(["train", "--config", str(bert_config), "--output", str(folder)])

    return ended(forked(work)), log.read_text()


def work(folder: Path, number: int) -> dict[str, Any]:
    one = config(folder)
    described = folder / "config.yaml"
    described.write_text(one.to_yaml())
    start = time.monotonic()
    assert ended(forked(lambda: finish(one, folder / "whole"))) == 0
    found: dict[str, Any] = {"seconds": time.monotonic() - start, "whole": weights(folder / "whole")}
    found["hit"], found["killed"] = kills(one, folder / "killed", number, found["seconds"])
    for name in ("SIGTERM", "SIGINT"):
        place = folder / name
        code, output = stopped(described, place, signal.Signals[name])
        found[name] = {"code": code, "output": output, "finished": (place / "result.json").exists()}
        found[name]["checkpoint"] = (place / "checkpoints/checkpoint-5/complete.json").exists()
        assert ended(forked(lambda place=place: finish(one, place))) == 0
        found[name]["weights"] = weights(place)
    code, output = starved(described, folder / "starved")
    found["starved"] = {"code": code, "output": output}
    assert ended(forked(lambda: finish(one, folder / "starved"))) == 0
    found["starved"]["weights"] = weights(folder / "starved")
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    gc.collect()
    gc.freeze()  # collections in the children skip what was imported
    (place / "found.json").write_text(json.dumps(work(place, int(sys.argv[2]))))
