"""Recorded steps, with the recording played on the CPU: every capturable method records, replays and is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam.capture import Captured
from deltasam.capture._graph import RecordedStep
from deltasam.methods import SAM
from helpers.captured_models import CAPTURABLE, CASES, Case, difference, gradients
from helpers.rows import Row
from helpers.taped import play_graphs_on_the_cpu

LLAMAS = {case.name: case for case in CASES if "Llama" in case.name}
ODD = ("sam", "delta-sam", "gsam")  # where some parameters are left to torch; all others are the fused kernel's
TABLE = [(row, case) for case in LLAMAS.values() for row in CAPTURABLE if "odd" not in case.name or row.name in ODD]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("row", "case"), TABLE, ids=str)
def test_a_replayed_step_is_the_ordinary_one(row: Row, case: Case) -> None:
    model, captured, method = case.model(), Captured(case.method(row)), case.method(row)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(3):  # ordinary, recorded and replayed, replayed
        found = []
        for taken in (method, captured):
            model.zero_grad()
            step = taken.backward(model, case.batch(seed=number), case.objective)
            found.append((gradients(model), step))
        (wanted, ordinary), (replayed, step) = found
        assert difference(replayed, wanted) < 1e-4, number
        torch.testing.assert_close(step.losses, ordinary.losses)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert captured.report.obstacles == {}
    assert (captured.report.ordinary, captured.report.recorded, captured.report.replayed) == (1, 1, 2)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("case", [LLAMAS["Llama"], LLAMAS["Llama, odd sizes"]], ids=str)
def test_the_kernel_takes_all_parameters_or_leaves_some_to_torch(case: Case) -> None:
    model, captured = case.model(), Captured(SAM())
    for _ in range(2):
        captured.backward(model, case.batch(), case.objective)
    (entry,) = captured._seen.values()
    assert isinstance(entry, RecordedStep)
    assert entry._graph.kernels == 1
    taken = [p.numel() % 4 == 0 for p in model.parameters()]
    assert entry._tables._used == 6 * sum(taken)
    assert all(taken) == (case.name == "Llama")


@pytest.mark.usefixtures("graphs")
def test_a_batch_without_tensors() -> None:
    def objective(model: nn.Module, batch: dict[str, float]) -> Tensor:
        return model(torch.ones(4, 4)).squeeze(-1) ** batch["power"]

    model, captured = nn.Linear(4, 1), Captured(SAM())
    for _ in range(3):
        model.zero_grad()
        captured.backward(model, {"power": 2.0}, objective)
    assert captured.report.obstacles == {}
    assert captured.report.replayed == 2
    assert model.weight.grad is not None
