"""Processes that die: a worker of the data loader, and the run itself while it writes its first file."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from deltasam.integrations import LostError
from deltasam.integrations._worker_errors import explain_worker_errors
from deltasam.lab.cli import main
from deltasam.lab.experiments import ConfigError, RunConfig, RunFolder, run
from deltasam.lab.experiments._trainer import RunTrainer
from deltasam.methods import Method
from helpers.fault_runs import config
from helpers.trainers import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


class Deadly(Dataset[Any]):
    """Rows that end the worker that fetches one once the file ``now`` exists; until then fetches are counted."""

    def __init__(self, rows: Any, now: Path) -> None:
        self.rows, self.now = rows, now

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            if self.now.exists():
                self.now.unlink(missing_ok=True)
                os._exit(3)
            with fetched(self.now).open("ab", buffering=0) as file:
                file.write(b".")
        return self.rows[index]


def fetched(now: Path) -> Path:
    """Returns a file with one byte for every row that a worker has fetched."""
    return now.with_name("fetched")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    plain = config(tmp_path_factory.mktemp("parts")).to_plain()
    return RunConfig.from_plain(plain | {"workers": 2})


@pytest.fixture(scope="module")
def wanted(one: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of an undisturbed run, without workers."""
    folder = tmp_path_factory.mktemp("whole")
    run(RunConfig.from_plain(one.to_plain() | {"workers": 0}), folder)
    return load_file(folder / "model/model.safetensors")


def touch(now: Path, workers: tuple[int, ...]) -> None:
    now.touch()


def kill(now: Path, workers: tuple[int, ...]) -> None:
    # Once all rows are fetched the workers are idle. A worker that is killed while it holds the queue lock would
    # block the loader forever.
    until(lambda: fetched(now).stat().st_size == 2 * 48)
    os.kill(workers[0], signal.SIGKILL)
    # Torch raises in a signal handler, wherever this process is: wait for it here, not in a finaliser, where Python
    # drops exceptions, and not after the last batch, when the worker is no longer needed.
    until(lambda: False)


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not true():
        assert time.monotonic() < limit, "timed out"
        time.sleep(0.01)


def forget(loaders: Iterable[int]) -> None:
    """Makes torch stop watching the workers of these loaders.

    It raises in a signal handler when a worker was killed. If the handler interrupts the end of the loader, in a
    finaliser where exceptions are dropped, torch keeps watching, and raises in unrelated code when a process ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    gc.collect()  # torch watches workers as long as their loader exists
    for loader in loaders:
        with suppress(ValueError):  # it has ended normally
            signal_handling._remove_worker_pids(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


# The workers of the second epoch start after update 6; after update 8 they have been asked for all of its six batches.
@pytest.mark.parametrize(("end", "at"), [(touch, 6), (kill, 8)])
def test_a_worker_of_the_data_loader_dies(
    end: Callable[[Path, tuple[int, ...]], None], at: int, one: RunConfig, wanted: dict[str, Tensor], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder, now = tmp_path / "run", tmp_path / "now"

    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        if step == at:
            end(now, workers)

    build = RunTrainer.__init__

    def spoiled(self: Any, *args: Any, train_dataset: Any, **kwargs: Any) -> None:
        build(self, *args, train_dataset=Deadly(train_dataset, now), **kwargs)

    loaders: list[int] = []
    workers: tuple[int, ...] = ()
    set_pids = signal_handling._set_worker_pids

    def noted(loader: int, pids: tuple[int, ...]) -> None:
        nonlocal workers
        loaders.append(loader)
        workers = pids  # of the latest loader
        set_pids(loader, pids)

    message = ""
    with monkeypatch.context() as patched:
        patched.setattr(RunTrainer, "__init__", spoiled)
        patched.setattr(signal_handling, "_set_worker_pids", noted)
        try:
            run(one, folder, watch=watch)
        except LostError as error:
            message = str(error)
        finally:
            forget(loaders)
    assert loaders
    assert "worker of the data loader has died" in message
    assert "resume from its last complete checkpoint" in message
    good = RunFolder(folder).last_checkpoint(12)
    assert good is not None
    assert int(good.name.rpartition("-")[2]) >= 6
    monkeypatch.setattr("deltasam.lab.experiments.lock.PATIENCE", 300.0)  # remaining workers hold the lock
    run(one, folder)
    assert_same_bits(load_file(folder / "model/model.safetensors"), wanted)


def test_other_errors_are_not_taken_for_deaths() -> None:
    with pytest.raises(RuntimeError, match=r"^shape mismatch$") as raised, explain_worker_errors(lambda: "Go on"):
        raise RuntimeError("shape mismatch")
    assert raised.type is RuntimeError
    with (
        pytest.raises(LostError, match=r"another process.*Connection closed by peer.*Go on"),
        explain_worker_errors(lambda: "Go on"),
    ):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (ConnectionResetError, errno.ECONNRESET),
        (ConnectionRefusedError, errno.ECONNREFUSED),
        (FileNotFoundError, errno.ENOENT),
        (EOFError, None),
    ],
)
def test_a_worker_dies_while_it_sends(
    kind: type[Exception], number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch still takes a worker that was just killed for alive, and raises the error of the broken connection.
    def cut(*args: Any) -> Any:
        raise kind() if number is None else kind(number, os.strerror(number))

    monkeypatch.setattr(resource_sharer._resource_sharer, "get_connection", cut)
    rows = iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=1))
    with (
        pytest.raises(LostError, match=r"worker of the data loader has died.*Go on"),
        explain_worker_errors(lambda: "Go on"),
    ):
        next(rows)
    rows._shutdown_workers()  # the error refers to it and would keep the worker alive


class Unreadable(Dataset[Any]):
    """Rows that cannot be read."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise self.kind("the file server went away")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ConnectionResetError, RuntimeError])
def test_an_error_of_the_dataset_is_not_a_death(kind: type[Exception], workers: int) -> None:
    loader = DataLoader(Unreadable(kind), num_workers=workers)
    with pytest.raises(kind, match="the file server went away") as raised, explain_worker_errors(lambda: "Go on"):
        next(iter(loader))
    assert raised.type is kind


def test_kill_inside_the_claim(one: RunConfig, wanted: dict[str, Tensor], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        folder.claim(one)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [path.name for path in folder.path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith("config.yaml.partial-")
    assert folder.finished(one) is None
    run(one, folder.path)
    assert_same_bits(load_file(folder.model / "model.safetensors"), wanted)
    assert not list(folder.path.glob("*.partial-*"))


def test_a_folder_with_anything_else_in_it_is_refused(one: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml.partial-1").touch()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        RunFolder(tmp_path).finished(one)


def test_memory_runs_out_and_the_run_continues_in_parts(
    one: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = one.to_plain() | {"workers": 0, "schedule": {"steps": 4}, "method": "SAM"}
    plain["model"] = plain["model"] | {"dropout": 0.0}
    whole = RunConfig.from_plain(plain)
    split = RunConfig.from_plain(plain | {"on_out_of_memory": "split"})
    assert whole.run_id == split.run_id
    run(whole, tmp_path / "whole")
    run_step = Method.run_step

    def hungry(self: Method, passes: Any) -> Any:
        if len(passes.batches[0]["labels"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run_step(self, passes)

    monkeypatch.setattr(Method, "run_step", hungry)
    run(split, tmp_path / "split")
    assert [record.getMessage().split(";")[0] for record in caplog.records if "memory ran out" in record.message] == [
        "memory ran out in a step over parts of 8 instances",
        "memory ran out in a step over parts of 4 instances",
    ]
    first, second = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "split"))
    # The bias of the keys does not matter to a softmax: its gradient is rounding, which Adam makes as large as any.
    assert max(float((first[n] - second[n]).abs().max()) for n in first if not n.endswith("key.bias")) < 1e-4
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"on_out_of_memory='split' works in one process.* 2"):
        run(split, tmp_path / "two")


@pytest.mark.parametrize(
    ("setting", "output"),
    [
        ("workers=-1", "workers=-1 must be"),
        ("on_out_of_memory=retry", "on_out_of_memory"),
        ("capture=true", "capture=True and on_out_of_memory='split' exclude each other"),
        ("method=SubsetSAM", "SubsetSAM, which picks instances from the whole batch"),
    ],
)
def test_bad_options(
    setting: str, output: str, one: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = tmp_path / "config.yaml"
    described.write_text(one.to_yaml())
    command = ["train", "--config", str(described), "--output", str(tmp_path / "run"), "on_out_of_memory=split"]
    command += ["--method", "SubsetSAM"] if setting.startswith("method") else [setting]
    assert main(command) == 2
    assert output in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
