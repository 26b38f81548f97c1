"""Tensors from a checkpoint that do not fit the part that a process holds."""

from __future__ import annotations

import pytest
import torch

from deltasam.parallel.shards import remembered


def test_a_whole_tensor_of_another_shape() -> None:
    message = r"the state holds a whole tensor, shape \(3,\), this process a whole tensor, shape \(4,\):"
    with pytest.raises(ValueError, match=message):
        remembered(torch.zeros(3), torch.zeros(4))
