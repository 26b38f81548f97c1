"""The mean over processes; the others are simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasam.parallel.ranks import Ranks


def test_the_mean_is_not_the_sum_and_does_not_change_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta-SAM divides the weights by it, for half precision; the normalised direction does not show the factor."""

    def all_reduce(value: torch.Tensor, group: Any, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        value += group  # the values of the others

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks = Ranks(torch.nn.Linear(1, 1))
    ranks.size, ranks._groups = 4, [5.0, 6.0]
    own = torch.tensor(1.0)
    assert ranks.mean(own).item() == 3.0
    assert own.item() == 1.0


def test_a_gradient_that_only_another_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not use the first parameter, the other does; no process uses the third."""

    def all_reduce(value: torch.Tensor, group: Any, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        if op == torch.distributed.ReduceOp.MAX:
            value.copy_(torch.maximum(value, torch.tensor([1, 0, 0], dtype=value.dtype)))
        else:
            value += torch.tensor([4.0, 0.0])

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks: Any = Ranks(torch.nn.Linear(1, 1))
    ranks.size, ranks._wrapper = 2, SimpleNamespace(find_unused_parameters=True, process_group=None)
    params = [torch.zeros(1) for _ in range(3)]
    first, second, third = ranks.mean_gradients([None, torch.ones(1), None], params)
    assert (first.item(), second.item(), third) == (2.0, 0.5, None)
