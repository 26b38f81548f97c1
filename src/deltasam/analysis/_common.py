"""What the analyses share: batches on the model's device, eval mode, a progress bar, rank correlation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.batches import tree_map
from deltasam.methods import Method
from deltasam.passes import ObjectiveLike
from deltasam.randomness import RandomState, accelerators


def batches_of(
    model: nn.Module, data: Iterable[Any], limit: int | None, progress: bool | None, description: str
) -> Iterator[Any]:
    """The batches, on the device of the model, with a progress bar if asked for (by default: on a terminal)."""
    device = next(model.parameters()).device
    count = 0
    for batch in _tracked(data, limit, progress, description):
        if limit is not None and count >= limit:
            break
        count += 1
        yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    if not count:
        raise ValueError("data is empty: pass an iterable of batches, such as a DataLoader")


def _tracked(data: Iterable[Any], limit: int | None, progress: bool | None, description: str) -> Iterable[Any]:
    if not (sys.stderr.isatty() if progress is None else progress):
        return data
    from rich.console import Console
    from rich.progress import track

    known = len(data) if isinstance(data, Sized) else None
    sizes = [size for size in (limit, known) if size is not None]
    return track(data, description, total=min(sizes, default=None), console=Console(stderr=True), transient=True)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode, and every module back in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def same_kernels() -> Iterator[None]:
    """On a CPU without bfloat16, autocast gives up mkldnn for good: what follows would sum in another order."""
    enabled = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled  # not by flags(), which warns about TF32 on some builds


def gradient_of(method: Method, model: nn.Module, batch: Any, objective: ObjectiveLike) -> Tensor:
    """The gradient a method would give the optimizer, as one float32 (or wider) vector; leaves no trace."""
    params = [p for p in model.parameters() if p.requires_grad]
    aside = [p.grad for p in params]
    state = RandomState.now(accelerators(params))
    try:
        for p in params:
            p.grad = None
        method.backward(model, batch, objective)
        wide = torch.promote_types(params[0].dtype, torch.float32)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        return torch.cat([(g.to_dense() if g.is_sparse else g).flatten().to(wide) for g in parts])
    finally:
        state.restore()
        for p, grad in zip(params, aside, strict=True):
            p.grad = grad


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 40.0, 90.0]))
        1.0
    """
    ranks = torch.stack([v.argsort().argsort().double() for v in (a, b)])
    if a.shape[0] < 2:
        return float("nan")
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the angle between two vectors; not a number if one is zero."""
    return nn.functional.cosine_similarity(a, b, dim=0, eps=0.0)
