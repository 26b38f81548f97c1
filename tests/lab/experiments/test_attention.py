"""cuDNN's attention is off during runs on GPUs where its gradients are NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from deltasam.lab.experiments._attention import attention_without_nan


def pretend(monkeypatch: pytest.MonkeyPatch, version: str, capability: int) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))


@pytest.mark.parametrize(
    ("version", "capability", "enabled"),
    [("2.13.0+cu130", 9, False), ("2.11.0", 9, False), ("2.10.1", 9, True), ("2.13.0", 8, True), ("2.13.0", 10, True)],
)
def test_off_only_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: int, enabled: bool
) -> None:
    pretend(monkeypatch, version, capability)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_without_nan():
        assert torch.backends.cuda.cudnn_sdp_enabled() == (enabled and before)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_on_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.13.0", 9)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(RuntimeError), attention_without_nan():
        raise RuntimeError
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.10.0", 9)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention_without_nan():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu
def test_gradients_of_very_negative_logits_are_finite() -> None:
    """64 tokens, a mask, and logits of -120 everywhere: the case of pytorch issue 196678."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16) * 0.1 for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)
    for each in (q, k, v):
        each.requires_grad_()
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()[None, None]
    with attention_without_nan():
        scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in (q, k, v))
