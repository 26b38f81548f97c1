"""Promises 7 and 8: low precision, passes as stated, state in checkpoints.

For all methods in ``helpers/rows.py``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, SAM, LookSAM, Method
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT, grads, relative_error
from helpers.promises import assert_intact, rows, skip_exempt, snapshot
from helpers.rows import Row


@rows
def test_a_perturbation_inside_one_autocast_region_is_really_applied(row: Row) -> None:
    """Autocast caches its casts of the weights; with a stale one the second pass would use w instead of w + eps."""
    skip_exempt(row, "first-step-moves")
    if row.rho is None:
        pytest.skip("perturbs nothing")
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
    before = snapshot(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = objective(model, batch)  # fills the cache
        step = row.method(rho=0.5).backward(model, batch, row.wrap(objective))
        after = objective(model, batch)
    assert step.perturbed_losses is not None
    at_w = first if "losses-at-w" in row.exempt else step.losses
    if at_w.shape == step.perturbed_losses.shape:
        assert (step.perturbed_losses - at_w).abs().max() > 0.05
    assert torch.equal(first, after)
    assert_intact(model, before)


@rows
def test_bf16_autocast_gradients_are_close_to_float32(row: Row) -> None:
    if row.name in {"esam", "delta-sam-random"}:
        pytest.skip("chooses or shuffles instances by rounded losses")
    results = []
    for enabled in (False, True):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            row.method().backward(model, batch, row.wrap(objective))
        results.append(grads(model))
    assert relative_error(results[1], results[0]) < 0.1


@rows
def test_passes_are_counted_and_are_as_stated(row: Row) -> None:
    skip_exempt(row, "passes")
    model, batch, objective = TRANSFORMER.make()
    forwards = backwards = 0

    def forward(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    def backward(grad: Tensor) -> None:
        nonlocal backwards
        backwards += 1

    def counted(model: nn.Module, batch: Any) -> Tensor:
        losses = objective(model, batch)
        if losses.requires_grad:
            losses.register_hook(backward)
        return losses

    model.register_forward_hook(forward)
    step = row.method().backward(model, batch, row.wrap(counted))
    assert (forwards, backwards) == row.passes == (step.forwards, step.backwards)


@rows
def test_state_in_a_checkpoint_continues_exactly(row: Row) -> None:
    def train(model: nn.Module, method: Any, optimizer: Any, batch: Any, objective: Any, steps: int) -> None:
        for _ in range(steps):
            method.backward(model, batch, objective)
            optimizer.step()
            optimizer.zero_grad()

    model, batch, objective = TRANSFORMER.make()
    wrapped, method = row.wrap(objective), row.method()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    train(model, method, optimizer, batch, wrapped, 4)
    saved = {
        "model": {n: p.clone() for n, p in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "method": copy.deepcopy(method.state_dict()),
        "objective": copy.deepcopy(wrapped.state_dict()) if hasattr(wrapped, "state_dict") else None,
        "rng": torch.get_rng_state(),
    }
    train(model, method, optimizer, batch, wrapped, 3)

    other, _, _ = TRANSFORMER.make()
    wrapped, method = row.wrap(objective), row.method()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    method.load_state_dict(saved["method"])
    if saved["objective"] is not None:
        wrapped.load_state_dict(saved["objective"])
    torch.set_rng_state(saved["rng"])
    train(other, method, optimizer, batch, wrapped, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class Island(nn.Module):
    """A product outside autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inside(x))
        with torch.autocast("cpu", enabled=False):
            return self.outside(h.float()).squeeze(-1) ** 2


@pytest.mark.parametrize("method", [ERM(), SAM(rho=1e-30)], ids=["erm", "sam"])
def test_backward_runs_outside_of_the_users_autocast(method: Method) -> None:
    """As in torch's examples: an operation that is float32 in the forward pass is not rounded in backward."""
    model, other, x = Island(), Island(), torch.randn(5, 6)
    other.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method.backward(model, x, lambda model, x: model(x))
        loss = other(x).mean()
    loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_loading_a_checkpoint_replaces_the_state() -> None:
    model, batch, objective = TRANSFORMER.make()
    method = LookSAM(k=3)
    for _ in range(2):
        method.backward(model, batch, objective)
    method.load_state_dict({"steps": 1})
    assert method.state_dict() == {"steps": 1}
    assert method.backward(model, batch, objective).forwards == 2  # nothing to reuse: SAM
