"""The clock, the memory counter and the pass counter, on functions with known results."""

from __future__ import annotations

import gc
import json
import runpy
from pathlib import Path

import pytest
import torch

from deltasam.lab.bench._clock import Clock, Spread, interleaved, ratios
from deltasam.lab.bench._memory import idle_in_graphs, peak_bytes
from deltasam.lab.bench._passes import counted_passes
from helpers.clocks import StoodClock
from helpers.data import REPOSITORY

CPU = torch.device("cpu")
MIB = 2**20


def block() -> torch.Tensor:
    return torch.ones(MIB // 4)


def test_measuring_leaves_the_garbage_collector_as_it_was() -> None:
    def counted() -> int:
        found: list[int] = []
        work = {"one": lambda: found.append(gc.get_freeze_count())}
        interleaved(work, rounds=1, warmup=0, clock="wall", synchronize=lambda: None)
        return found[0]

    before = gc.get_freeze_count()
    assert before > 0  # by conftest.py
    assert counted() > before // 2  # some may be freed in the meantime
    assert gc.get_freeze_count() > before // 2
    gc.unfreeze()
    try:
        assert counted() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_peak_counts_storages_that_are_alive_together() -> None:
    def one_after_another() -> None:
        for _ in range(3):
            block()

    def together() -> None:
        _ = [block() for _ in range(3)]

    assert peak_bytes(one_after_another, CPU) == MIB
    assert peak_bytes(together, CPU) == 3 * MIB


def test_peak_follows_storages_not_tensors() -> None:
    def views() -> None:
        whole = block()
        part = whole[:10].view(2, 5)
        del whole
        part.add_(1)
        block()

    assert peak_bytes(views, CPU) == 2 * MIB


def test_peak_sees_what_autograd_holds() -> None:
    x = block().requires_grad_()

    def work() -> None:
        (x.exp().exp().sum()).backward()  # two saved results and one gradient

    peak = peak_bytes(work, CPU)
    assert 3 * MIB <= peak <= 4 * MIB + 64
    assert x.grad is not None


def test_peak_does_not_count_earlier_storages() -> None:
    old = block()
    assert peak_bytes(lambda: old.add_(1), CPU) < 64


def segment(total: int, allocated: int, pool: tuple[int, int]) -> dict[str, object]:
    return {"total_size": total, "allocated_size": allocated, "segment_pool_id": pool}


def test_only_private_pools_hold_idle_memory() -> None:
    cached = segment(100, 10, (0, 0))  # free for everyone
    assert idle_in_graphs([cached, segment(50, 20, (0, 1)), segment(7, 7, (3, 0))]) == 30


class FakeAllocator:
    """A device whose counter treats the pool of a graph as free between replays, as CUDA's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 1000  # the weights
        self.pool = 0
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "peak", self.allocated))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment(self.pool, 0, (0, 1))])

    def use(self, size: int) -> None:
        self.peak = max(self.peak, self.allocated + size)


def test_the_pool_of_a_graph_counts_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeAllocator(monkeypatch)

    def captured_step() -> object:
        device.use(300)  # the eager step
        device.pool = 320
        device.use(310)  # the recording
        device.allocated += 40  # buffers outside the pool
        return lambda: device.use(5)

    assert peak_bytes(captured_step, torch.device("cuda")) == 320 + 40 + 5


def test_a_step_without_graphs_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeAllocator(monkeypatch)

    def eager_step() -> object:
        device.use(300)
        return lambda: device.use(10_000)

    assert peak_bytes(eager_step, torch.device("cuda")) == 300


def test_passes_count_shares_of_the_batch_and_only_real_backwards() -> None:
    model = torch.nn.Linear(3, 2)
    x = torch.ones(4, 3)
    with counted_passes(model, size=4) as count:
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        model(x[:2]).sum().backward()
        model(x)  # no backward
    assert (count.forwards, count.backwards) == (3.5, 1.5)
    model(x).sum().backward()
    assert count.forwards == 3.5  # the hook is removed


def test_rounds_are_interleaved_and_warmup_is_not_timed() -> None:
    calls: list[str] = []
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = interleaved(
        works, rounds=2, warmup=1, clock="wall", synchronize=lambda: None, repeats={"a": 2}, prepare=lambda: None
    )
    assert "".join(calls) == "baa" + "aab" + "baa"  # the order rotates
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(("clock", "name"), [("wall", "perf_counter"), ("cpu", "process_time")])
def test_preparation_is_not_timed(clock: Clock, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stood = StoodClock(monkeypatch, name)
    works = {"short": stood.work(1 / 64), "long": stood.work(1 / 8)}
    seconds = interleaved(
        works, rounds=3, warmup=1, clock=clock, synchronize=lambda: None, repeats={"short": 2}, prepare=stood.work(4)
    )
    assert seconds == {"short": [1 / 64] * 3, "long": [1 / 8] * 3}
    assert ratios(seconds, "long", "short") == Spread(8.0, 8.0, 8.0)


def test_the_device_is_synchronised_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    stood = StoodClock(monkeypatch)
    begun: list[float] = []

    def synchronize() -> None:
        stood.now += sum(begun)  # asynchronous work ends here
        begun.clear()

    works = {"a": lambda: begun.append(1 / 4)}
    seconds = interleaved(
        works, rounds=2, warmup=0, clock="wall", synchronize=synchronize, prepare=lambda: begun.append(8.0)
    )
    assert seconds == {"a": [1 / 4, 1 / 4]}


def test_spread_of_one_and_of_many() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_ratios_are_computed_round_by_round() -> None:
    assert ratios({"a": [1.0, 10.0], "b": [2.0, 20.0]}, "b", "a") == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        ratios({"a": [1.0], "b": [2.0, 20.0]}, "b", "a")


def test_operations_are_counted_without_those_that_launch_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    script = runpy.run_path(str(REPOSITORY / "benchmarks" / "operations.py"))
    x = torch.ones(2, 3)
    with script["Operations"]() as found:
        _ = torch.empty_like(x.t().reshape(-1)) + x.detach().view(6)
    assert found.counts == {"clone": 1, "add": 1}, "a transposed tensor is copied before it is flattened"

    words = ["--model", "bert-tiny", "--size", "2x4", "--precision", "fp32", "--device", "cpu", "--methods"]
    script["main"]([*words, "per-instance-sam", "--out", str(tmp_path)])
    stored = json.loads((tmp_path / "bert-tiny-2x4-fp32.json").read_text())
    counts = {row["name"]: row["operations"] for row in stored["rows"]}
    assert 1.5 * counts["ERM"] < counts["SAM"] < counts["PerInstanceSAM"]
    assert str(tmp_path) not in json.dumps(stored)
