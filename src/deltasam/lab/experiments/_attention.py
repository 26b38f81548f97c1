"""Attention without a kernel that returns wrong gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_HOPPER = 9  # compute capability


@contextmanager
def attention_without_nan() -> Iterator[None]:
    """Switches cuDNN's attention off where its backward pass returns NaN; torch takes another kernel.

    On Hopper GPUs, since torch 2.11, gradients of queries are NaN if a mask is given, the texts have 64, 192, 320, ...
    tokens, and a row's logits are all very negative (pytorch issue 196678). Batches that are padded to multiples of
    32 or 64 often have such lengths: without this, every such update of a SmolLM2 run was skipped.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not _returns_nan())
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _returns_nan() -> bool:
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    return (
        (major, minor) >= (2, 11)
        and torch.cuda.is_available()
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability()[0] == _HOPPER
    )
