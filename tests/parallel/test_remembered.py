"""What a checkpoint holds of a tensor, and what a process has of it."""

from __future__ import annotations

import pytest
import torch

from deltasam.parallel.shards import remembered


def test_a_whole_tensor_is_no_part() -> None:
    told = r"the state holds a whole tensor, shape \(3,\), this process a whole tensor, shape \(4,\):"
    with pytest.raises(ValueError, match=told):
        remembered(torch.zeros(3), torch.zeros(4))
