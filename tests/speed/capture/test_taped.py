"""Recorded steps with a simulated graph on the CPU: every capturable method is recorded, replayed and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import SAM, TRAM, FriendlySAM, Method, PerInstanceSAM
from deltasam.speed.capture import Captured
from deltasam.speed.capture._graph import RecordedStep
from helpers.captured_models import CAPTURABLE, CASES, Case, batch, compare, smol, trajectory
from helpers.rows import Row
from helpers.taped import play_graphs_on_the_cpu

BY_NAME = {case.name: case for case in CASES}
ROWS = {row.name: row for row in CAPTURABLE}
# The fused kernel supports all parameters of Llama and of adapters; with odd sizes some are left to torch.
TABLE = [(row, BY_NAME[case], False) for case in ("Llama", "Llama + LoRA (adapters)") for row in CAPTURABLE]
SOME = ("Llama + LoRA (base matrices)", "Llama, odd sizes")
TABLE += [(ROWS[name], BY_NAME[case], False) for case in SOME for name in ("sam", "delta-sam", "gsam", "per-instance")]
TABLE += [(ROWS[name], BY_NAME[case], True) for case in ("BERT", "Llama") for name in ("sam", "per-instance")]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("row", "case", "bf16"), TABLE, ids=str)
def test_a_replayed_step_equals_the_ordinary_one(row: Row, case: Case, bf16: bool) -> None:
    compare(case, row, bf16=bf16).check(case.tolerance(row, bf16=bf16))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("method", [SAM, PerInstanceSAM, FriendlySAM])
def test_trajectories(method: Callable[..., Method]) -> None:
    """The optimizer is recorded too."""
    data = [batch(4, 8, 64, tokens=True, seed=k % 2) for k in range(6)]
    found = []
    for capture in (True, False):
        model = smol("cpu", vocab_size=64, hidden_size=36, num_hidden_layers=1, intermediate_size=48)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found.append(trajectory(method(rho=0.2), model, optimizer, data, capture=capture))
    captured, ordinary = found
    captured.check(ordinary, 0.002)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("against", "rho"), [("noise", 20.0), ("previous", 5.0)])
def test_a_replay_draws_new_noise_and_remembers_the_weights(against: Any, rho: float) -> None:
    data = [batch(4, 8, 64, tokens=True, seed=k % 2) for k in range(6)]
    found = []
    for capture in (True, False):
        model = smol("cpu", vocab_size=64, hidden_size=36, num_hidden_layers=1, intermediate_size=48)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found.append(trajectory(TRAM(rho=rho, against=against), model, optimizer, data, capture=capture))
    captured, ordinary = found
    assert (captured.report.recorded, captured.report.obstacles) == (1, {})
    assert captured.report.replayed >= 4
    torch.testing.assert_close(captured.losses, ordinary.losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(captured.perturbed, ordinary.perturbed, rtol=1e-3, atol=0)
    assert (ordinary.perturbed - ordinary.losses)[1:].min() > 0.1


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("case", [BY_NAME["Llama"], BY_NAME["Llama, odd sizes"]], ids=str)
def test_the_kernel_moves_all_parameters_or_leaves_some_to_torch(case: Case) -> None:
    model, captured = case.model(), Captured(SAM())
    for _ in range(2):
        captured.backward(model, case.batch(), case.objective)
    (entry,) = captured._seen.values()
    assert isinstance(entry, RecordedStep)
    assert entry._graph.kernels == 1
    taken = [p.numel() % 4 == 0 for p in model.parameters()]
    assert entry._tables._used == 7 * sum(taken)
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
