"""The analyses on a CUDA device: without TF32, and with autocast for bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deltasam.analysis import alignment, weights_quality
from deltasam.step.float32 import float32_kept, full_float32
from deltasam.weighting import FiniteDifference, OwnGradient
from helpers.problems import TRANSFORMER_NO_DROPOUT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _with_tf32() -> Iterator[None]:
    with float32_kept():
        torch.set_float32_matmul_precision("high")
        yield


def test_float32_is_float32_and_bf16_is_not() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32, size=8)
    model.cuda()
    options = {"weightings": {"own": OwnGradient()}, "conditions": ["float32", "bf16"]}
    plain, half = weights_quality(model, [batch], objective, **options)  # type: ignore[arg-type]
    torch.set_float32_matmul_precision("highest")
    again, _ = weights_quality(model, [batch], objective, **options)  # type: ignore[arg-type]
    assert plain.median == pytest.approx(again.median, rel=1e-6)
    assert plain.snr > 100 * half.snr


def test_alignment_does_not_use_tf32() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32, size=8)
    model.cuda()
    chosen = {"fd": FiniteDifference()}
    found = alignment(model, [batch], objective, weightings=chosen)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    exact = alignment(model, [batch], objective, weightings=chosen)
    for one, other in zip(found, exact, strict=True):
        assert one.regulariser == pytest.approx(other.regulariser, rel=1e-4)


def test_products_are_in_float32() -> None:
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    with full_float32(a.device):
        exact = a @ b
    assert not torch.equal(exact, a @ b)


def test_convolutions_are_in_float32() -> None:
    """cuDNN uses TF32 for convolutions by default."""
    images, kernels = torch.randn(4, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    exact = torch.nn.functional.conv2d(images.double(), kernels.double())
    with full_float32(images.device):
        error = (torch.nn.functional.conv2d(images, kernels) - exact).norm() / exact.norm()
    assert float(error) < 1e-5
