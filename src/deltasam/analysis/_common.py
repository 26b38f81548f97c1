"""Shared by the analyses: batches on the model's device, eval mode, progress bars, correlations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.methods import Method
from deltasam.step.batches import tree_map
from deltasam.step.draws import use_of
from deltasam.step.passes import ObjectiveLike
from deltasam.step.randomness import RandomState, accelerators, generators_of

_CHUNK = 2**20  # entries


def batches_of(
    model: nn.Module, data: Iterable[Any], limit: int | None, progress: bool | None, description: str
) -> Iterator[Any]:
    """Yields the batches on the device of the model, with a progress bar if wanted."""
    device = next(model.parameters()).device
    count = 0
    for batch in tracked(data, limit, progress, description):
        if limit is not None and count >= limit:
            break
        count += 1
        yield tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
    if not count:
        raise ValueError("data is empty: pass an iterable of batches, such as a DataLoader")


def tracked(data: Iterable[Any], limit: int | None, progress: bool | None, description: str) -> Iterable[Any]:
    """Adds a progress bar if wanted; by default on a terminal."""
    if not _wanted(progress):
        return data
    from rich.console import Console
    from rich.progress import track

    return track(data, description, total=_number(data, limit), console=Console(stderr=True), transient=True)


@contextmanager
def bar(
    data: Iterable[Any], limit: int | None, each: int, progress: bool | None, description: str
) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar of ``each`` measurements per batch; yields a function to call with the name of the next."""
    if not _wanted(progress):
        yield lambda name: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[now]}"),
    )  # fmt: skip
    batches = _number(data, limit)
    started = 0
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(description, total=None if batches is None else batches * each, now="")

        def begin(name: str) -> None:
            nonlocal started
            shown.update(task, completed=started, now=name)
            started += 1

        yield begin


def _wanted(progress: bool | None) -> bool:
    if progress is None:  # on a terminal, if rich is installed
        return sys.stderr.isatty() and find_spec("rich") is not None
    return progress


def _number(data: Iterable[Any], limit: int | None) -> int | None:
    sizes = [size for size in (limit, len(data) if isinstance(data, Sized) else None) if size is not None]
    return min(sizes, default=None)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Sets train or eval mode inside; restores the mode of every module afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        if training:
            model.train()
        else:
            for module in modes:  # not eval(), which may do more: loralib merges its weights
                module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def gradient_of(method: Method, model: nn.Module, batch: Any, objective: ObjectiveLike) -> Tensor:
    """Returns the gradient of a method as one vector, float32 or wider; restores ``.grad`` and the random state."""
    params = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in params]
    state = RandomState.now(accelerators(params), generators_of(model))
    try:
        for p in params:
            p.grad = None
        method.backward(model, batch, objective)
        wide = torch.promote_types(params[0].dtype, torch.float32)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        return torch.cat([(g.to_dense() if g.is_sparse else g).flatten().to(wide) for g in parts])
    finally:
        state.restore(use_of(model).streams())
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def spearman(a: Tensor, b: Tensor) -> float:
    """Returns the rank correlation; equal values share their mean rank.

    NaN if all values of one are equal, or one is not finite.
    """
    if a.shape[0] < 2 or not (a.isfinite().all() and b.isfinite().all()):
        return float("nan")
    return round(float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1]), 12)


def means(names: Sequence[str], rows: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Returns the mean of every column by name, and the columns as ``by_batch``."""
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return {**{name: fmean(values) for name, values in columns.items()}, "by_batch": columns}


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal - 1).double() / 2


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Returns the cosine of the angle between two vectors; NaN if one is zero.

    Sums in float64, in chunks: with torch's float32 sums the cosine of BERT-small's gradient with itself is 1.007.
    """
    return _dot(a, b) / (_dot(a, a) * _dot(b, b)).sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return torch.stack([torch.dot(x.double(), y.double()) for x, y in chunks]).sum()
