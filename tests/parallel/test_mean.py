"""The mean over processes, of which the others are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltasam.parallel.ranks import Ranks


def test_the_mean_is_not_the_sum_and_leaves_the_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta-SAM scales by it to keep half precision in range, which a direction of unit length does not show."""

    def all_reduce(value: torch.Tensor, group: Any) -> None:
        value += group  # what the others hold

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    ranks = Ranks(torch.nn.Linear(1, 1))
    ranks.size, ranks._groups = 4, [5.0, 6.0]
    own = torch.tensor(1.0)
    assert ranks.mean(own).item() == 3.0
    assert own.item() == 1.0


def test_a_gradient_that_only_another_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the first parameter is not used, there it is; nobody uses the third."""

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
