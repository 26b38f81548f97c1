"""Sizes that are computed with numbers of Python are those that kernels compute."""

from __future__ import annotations

import pytest
import torch

from deltasam.step.radius import sizes_of

NORMS = [2.5, 1e-3, 1e30, 0.0, 1e-37, 1e-39, 1e-320, float("inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [0.05, -0.05, 1, 1e10])
@pytest.mark.parametrize("value", NORMS)
def test_they_are_the_same(value: float, rho: float, dtype: torch.dtype) -> None:
    norm = torch.tensor(value, dtype=dtype)
    host, kernels = sizes_of(rho, norm, on_the_host=True), sizes_of(rho, norm)
    assert host.per_parameter == kernels.per_parameter
    for found, expected in ((host.steps, kernels.steps), (host.radius, kernels.radius)):
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert bool(found == 0) == bool(expected == 0)
