"""Compares eager steps on a GPU, in which the inputs of layers are stacked, with the loop over the instances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import PerInstanceSAM
from deltasam.per_instance import record
from deltasam.per_instance.algebra import factors, gradient, perturbation


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[factors.Stack]:
    """The stacks that are multiplied with coefficients, in steps that take a CPU for a GPU that waits for the host."""
    scaled: list[factors.Stack] = []
    scale = factors.Stack.scale

    def noted(self: factors.Stack, c: Tensor) -> None:
        scale(self, c)
        scaled.append(self)

    for module in (factors, gradient, perturbation):
        monkeypatch.setattr(module, "waits_for_host", lambda device: True)
    monkeypatch.setattr(factors.Stack, "scale", noted)
    return scaled


class Block(nn.Module):
    """Layers that share an input, layers of equal shape, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(48, 48), nn.Linear(48, 48, bias=False), nn.Linear(48, 48)
        self.wide, self.narrow, self.norm = nn.Linear(48, 64), nn.Linear(64, 48), nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.query(x)) * self.key(x))
        return self.norm(x + self.narrow(torch.tanh(self.wide(x))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A table that is looked up without a graph, and is the head: its matrix is stacked, its rows are perturbed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(50, 48), Block(), nn.Linear(48, 50)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.table(ids)
        return self.head(self.block(x))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that is used twice, and one that is not: not stacked, and stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Block(), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.again(self.first(x))))  # type: ignore[no-any-return]


CASES = {
    "layers": (lambda: nn.Sequential(Block(), Block()), lambda: torch.randn(4, 3, 48, dtype=torch.float64)),
    "tied": (Tied, lambda: torch.randint(50, (4, 3))),
    "twice": (Twice, lambda: torch.randn(4, 3, 48, dtype=torch.float64)),
}


def objective(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss per instance."""
    return model(batch).pow(2).sin().flatten(1).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_loop(name: str, group: int, stacks: list[factors.Stack]) -> None:
    make, batch_of = CASES[name]
    model, batch = make().double(), batch_of()
    found = []
    for engine in ("low-rank", "low-rank", "loop"):  # the first step is compared with autograd, too
        model.zero_grad()
        step = PerInstanceSAM(rho=0.3, group=group, engine=engine).backward(model, batch, objective)
        found.append([step.perturbed_losses, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])
    assert stacks
    assert all(stack.values.ndim == 4 for stack in stacks)


def test_gradients_that_serve_several_passes_keep_their_inputs(stacks: list[factors.Stack]) -> None:
    model, x = Block().double(), torch.randn(4, 3, 48, dtype=torch.float64)
    recording = record(model, lambda: objective(model, x), size=4)
    assert recording.gradients.stacks
    losses = []
    for c in (0.1, 0.1, 0.0):
        with recording.perturbed(torch.full((4,), c, dtype=torch.float64)):
            losses.append(objective(model, x).detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    torch.testing.assert_close(losses[2], recording.losses)
    assert not stacks
    assert bool((losses[0] - losses[2]).abs().min() > 0)


def test_gradients_for_one_pass_refuse_a_second_one(stacks: list[factors.Stack]) -> None:
    stack = factors.Stack(torch.ones(2, 3, 4, 5), once=True)
    stack.scale(torch.arange(3.0))
    assert stack.scaled is not None
    assert [part.shape for part in stack.scaled] == [torch.Size((3, 5, 4))] * 2
    with pytest.raises(AssertionError, match="one pass"):
        stack.scale(torch.arange(3.0))
