"""Shared by ``tests/methods/test_promises_*.py``: the parametrisation, and what a step must not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.problems import CNN, TRANSFORMER, Problem, grads
from helpers.regulariser_rows import ROWS as REGULARISER_ROWS
from helpers.rows import ROWS, Row

PROBLEMS = [TRANSFORMER, CNN]
rows = pytest.mark.parametrize("row", ROWS + REGULARISER_ROWS, ids=str)
problems = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)


def skip_exempt(row: Row, promise: str) -> None:
    if promise in row.exempt:
        pytest.skip(f"{row}: {promise} cannot hold by definition, see helpers/rows.py")


def run(row: Row, problem: Problem, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, ...]:
    model, batch, objective = problem.make(dtype)
    torch.manual_seed(3)
    step = row.method(**changes).backward(model, batch, row.wrap(objective))
    return model, step


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "pointers": {n: p.data_ptr() for n, p in model.named_parameters()},
        "objects": {n: id(p) for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
    }


def assert_intact(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for name, value in before["weights"].items():
        assert torch.equal(after["weights"][name], value), f"{name} changed"
    for key in ("pointers", "objects", "flags", "modes", "hooks"):
        assert after[key] == before[key], key


def plain(problem: Problem, row: Row, dtype: torch.dtype = torch.float64, size: int = 5) -> dict[str, Tensor]:
    model, batch, objective = problem.make(dtype, size)
    torch.manual_seed(3)
    row.wrap(objective)(model, batch).mean().backward()
    return grads(model)
