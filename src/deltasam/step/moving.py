"""The move to w + eps and back to w, bit for bit.

There are three ways of moving. On the CPU the parameters get other memory. Elsewhere their values change in place,
because compiled and sharded models hold the addresses. While a CUDA graph is recorded, w + eps is a new tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import compress, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import foreach_add, foreach_clone, foreach_copy_, foreach_lerp, foreach_lerp_, fused_ascent_
from deltasam.parallel.shards import any_shard, local, shard_number
from deltasam.step import fused
from deltasam.step.branches import is_recorded
from deltasam.step.fused.noise import Noise, fill
from deltasam.step.norms import dense, masked_product
from deltasam.step.randomness import Seed, seeded_generator
from deltasam.step.rounding import STORED, Grid, Rounding, add_rounded

_SMALL = 2**18  # elements that are moved in one call
_data, _device, _dtype, _is_cpu = map(attrgetter, ("data", "device", "dtype", "is_cpu"))


class Moved:
    """Parameters away from w. :meth:`mirror` takes them to the other side; leaving the context takes them back."""

    def __init__(self, params: Sequence[nn.Parameter], origin: Sequence[Tensor]) -> None:
        self._params = params
        self._origin = origin

    def pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every moved parameter with its value at w; of a sharded one the part that this process holds."""
        return zip(self._params, self._origin, strict=True)

    @torch.no_grad()
    def mirror(self) -> None:
        """Takes w + eps to w - eps.

        ``2 w - (w + eps)`` is exact where ``w + eps`` was rounded, so the two points are symmetric about w even in
        float32, which the second difference of Eq. 5 needs.
        """
        self._mirror([local(p.data) for p in self._params])
        torch.clear_autocast_cache()

    def _mirror(self, values: list[Tensor]) -> None:
        foreach_lerp_(values, list(self._origin), 2.0)


class _MovedRecorded(Moved):
    """As :class:`Moved`, but w - eps is a second copy: a recorded pass at w + eps may not have run yet."""

    def __init__(
        self, params: Sequence[nn.Parameter], origin: Sequence[Tensor], mirrored: Sequence[Tensor | None] = ()
    ) -> None:
        super().__init__(params, origin)
        self._mirrored = mirrored  # made together with w + eps, or None

    def _mirror(self, values: list[Tensor]) -> None:
        sides: list[Any] = list(self._mirrored) or [None] * len(values)
        rest = [k for k, value in enumerate(sides) if value is None]
        if rest:  # torch refuses an empty list
            made = foreach_lerp([values[k] for k in rest], [self._origin[k] for k in rest], 2.0)
            for k, value in zip(rest, made, strict=True):
                sides[k] = value
        for p, value in zip(self._params, sides, strict=True):
            p.data = value


def perturbed(
    params: Sequence[nn.Parameter],
    direction: Sequence[Tensor | Noise | None],
    step: Tensor,
    *,
    consume: bool = True,
    mirrored: bool = False,
    grids: Sequence[Grid | None] | None = None,
    seed: Seed = Seed(0, 0),  # noqa: B008 - a frozen record
) -> AbstractContextManager[Moved]:
    """Moves the parameters to ``w + step * direction`` and back to w, bit for bit, whatever happens inside.

    The direction is never written to. It may be the user's memory (a gradient that a hook keeps, a buffer that a
    custom function returns as its gradient), and gradients of several parameters may be views into one tensor.

    Extra memory: one copy of the moved parameters; a second one for :meth:`Moved.mirror` while a CUDA graph is
    recorded.

    Args:
        params: The parameters to move.
        direction: One tensor per parameter; None leaves it where it is; noise (:mod:`deltasam.step.fused.noise`) is
            drawn while it is added.
        step: A scalar tensor. Zero (a gradient that was not finite) moves nothing, whatever the direction holds.
        consume: Empty the list of directions, so that their memory can be freed.
        mirrored: :meth:`Moved.mirror` will be called. A recorded step then writes both sides at once, one of them over
            the direction, which must be the caller's own.
        grids: The precision in which each parameter is used, None for float32: the move is rounded to it
            stochastically, see :mod:`deltasam.step.rounding`. The precision in which it is stored takes precedence.
        seed: The seed of the rounding.
    """
    moved, given = list(params), list(direction)
    if type(None) in map(type, given):
        chosen = [d is not None for d in given]
        moved, given = list(compress(moved, chosen)), list(compress(given, chosen))
        grids = None if grids is None else list(compress(grids, chosen))
    if consume and isinstance(direction, list):
        direction.clear()
    way = _way_to_move(moved)
    if mirrored and way is _recorded:
        way = partial(_recorded, mirrored=True)
    return way(moved, given, step, _rounding(moved, grids, seed))


def _rounding(params: list[nn.Parameter], used: Sequence[Grid | None] | None, seed: Seed) -> Rounding | None:
    """How to round a move of these parameters; None if none needs it. All processes round a shard alike."""
    known = [None] * len(params) if used is None else used
    if not any(known) and STORED.keys().isdisjoint(map(_dtype, params)):
        return None
    grids = list(map(STORED.get, map(_dtype, params), known))
    if not any(grids):
        return None
    rounded = list(compress(params, grids))
    if any_shard(rounded):
        shards = {local(p.data).device: shard_number(p) for p in rounded}
    else:
        shards = dict.fromkeys(map(_device, rounded), ())
    generators = {
        device: seeded_generator(device, seed.child(number, *shard))
        for number, (device, shard) in enumerate(shards.items())
    }
    return Rounding(grids, generators)


def _way_to_move(params: list[nn.Parameter]) -> Callable[..., AbstractContextManager[Moved]]:
    if set(map(type, params)) != {nn.Parameter} and any(type(p.data) is not Tensor for p in params):
        return _in_place  # shards
    if all(map(_is_cpu, params)):
        return _lending
    return _recorded if all(is_recorded(p.device) for p in params) else _in_place


def _lending(
    params: list[nn.Parameter], direction: list[Any], step: Tensor, rounding: Rounding | None = None
) -> AbstractContextManager[Moved]:
    """On the CPU: the moved weights are other tensors."""
    size = float(step)  # no synchronisation: the value is on the host
    origin = list(map(_data, params))
    values = list(origin)
    with torch.no_grad():
        for start, end in _stretches(origin) if size else ():  # zero: the direction may not be finite
            if rounding is None or not any(rounding.grids[start:end]):
                values[start:end] = foreach_add(origin[start:end], direction[start:end], alpha=size)
            else:
                for k in range(start, end):
                    w, d = origin[k], direction[k]
                    is_exact = rounding.grids[k] is None
                    values[k] = torch.add(w, d, alpha=size) if is_exact else _rounded(w, d, step, rounding, k)
            direction[start:end] = repeat(None, end - start)  # freed as soon as it is used
    direction.clear()
    return _lent(params, values, origin)


def _stretches(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Stretches of the list with small tensors in one, large ones alone: each is one call, and holds little memory."""
    start = held = 0
    sizes = list(map(Tensor.numel, tensors))
    for k, size in enumerate(sizes if sum(sizes) > _SMALL else ()):
        if held and held + size > _SMALL:
            yield start, k
            start, held = k, 0
        held += size
    if tensors:
        yield start, len(tensors)


@contextmanager
def _lent(
    params: list[nn.Parameter], values: list[Tensor], origin: list[Tensor], kind: Callable[..., Moved] = Moved
) -> Iterator[Moved]:
    """Gives the parameters other tensors; the memory at w is not touched."""
    back = map(setattr, params, repeat("data"), origin)
    try:
        deque(map(setattr, params, repeat("data"), values), maxlen=0)
        torch.clear_autocast_cache()  # autocast remembers its casts of the weights by parameter, not by value
        yield kind(params, origin)
    finally:
        deque(back, maxlen=0)  # one call: an interruption (Ctrl-C) finds all of them restored, or none
        torch.clear_autocast_cache()


@contextmanager
def _in_place(
    params: list[nn.Parameter], direction: list[Any], step: Tensor, rounding: Rounding | None = None
) -> Iterator[Moved]:
    """On accelerators: the values change in place, and are restored from a copy."""
    weights = list(map(_data, params))
    if any_shard(weights) or any_shard(direction):
        weights, direction[:] = list(map(local, weights)), list(map(local, direction))
    origin = _copies(weights)
    try:
        with torch.no_grad():
            add_scaled_(weights, direction, step, rounding)
        direction.clear()  # during the passes at w + eps one copy of the parameters is held, not two
        torch.clear_autocast_cache()
        yield Moved(params, origin)
    finally:
        foreach_copy_(weights, origin)  # first, and in one call, as above; neither side has a graph
        torch.clear_autocast_cache()


@contextmanager
def _recorded(
    params: list[nn.Parameter],
    direction: list[Any],
    step: Tensor,
    rounding: Rounding | None = None,
    mirrored: bool = False,
) -> Iterator[Moved]:
    """For a step that is being recorded: its kernels keep the addresses that they see, so nothing is copied back."""
    weights = [p.data for p in params]
    others: list[Tensor | None] = []
    with torch.no_grad():
        if mirrored and rounding is None:
            made, others = fused.mirrored(weights, direction, step)
        elif rounding is None or step.device not in rounding.generators:
            made = fused.moved(weights, direction, step)
        else:
            made = fused.moved(weights, direction, step, rounding.grids, _random_number(rounding, step.device))
        for k in _noisy(direction):
            made[k] = torch.empty_like(weights[k])
        _add_noise(weights, direction, made, step, rounding)
        rest = [k for k, value in enumerate(made) if value is None]
        copies = _copies([weights[k] for k in rest])
        add_scaled_(copies, [direction[k] for k in rest], step, None if rounding is None else rounding.of(rest))
    direction.clear()
    for k, copy in zip(rest, copies, strict=True):
        made[k] = copy
    values = [value for value in made if value is not None]
    with _lent(params, values, weights, partial(_MovedRecorded, mirrored=others)) as moved:
        yield moved


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return foreach_clone(tensors) if tensors else []  # torch refuses an empty list


def _noisy(direction: Sequence[Any]) -> list[int]:
    return [k for k, d in enumerate(direction) if isinstance(d, Noise)]


def _add_noise(
    weights: Sequence[Tensor],
    direction: Sequence[Any],
    outs: Sequence[Any],
    step: Tensor,
    rounding: Rounding | None,
) -> None:
    """Writes ``w + step * noise`` to ``outs``, for the tensors whose direction is noise that is not drawn yet."""
    which = _noisy(direction)
    if which:
        grids = [None if rounding is None else rounding.grids[k] for k in which]
        fill([weights[k] for k in which], [direction[k] for k in which], [outs[k] for k in which], step, grids)


def add_scaled_(weights: list[Tensor], direction: list[Any], step: Tensor, rounding: Rounding | None = None) -> None:
    """``weights += step * direction`` in place; a zero step changes nothing, even where the direction is not finite.

    No host synchronisation. Dense tensors of one dtype and device take a single fused kernel: the Triton kernel if
    they are rounded, else that of ``torch.optim.SGD(fused=True)``.
    """
    if noisy := _noisy(direction):
        _add_noise(weights, direction, weights, step, rounding)
        rest = [k for k in range(len(weights)) if k not in noisy]
        weights, direction = [weights[k] for k in rest], [direction[k] for k in rest]
        rounding = None if rounding is None else rounding.of(rest)
    if rounding is not None:
        taken = _add_rounded_(weights, direction, step, rounding)
        rest = [k for k in range(len(weights)) if k not in taken]
        weights, direction = [weights[k] for k in rest], [direction[k] for k in rest]
    if not weights:
        return
    first = weights[0]
    kinds = {(type(t), t.dtype, t.device, t.is_sparse) for t in (*weights, *direction)}
    alike = kinds == {(Tensor, first.dtype, first.device, False)} and all(map(fused.is_dense, weights))
    if alike and first.device.type == "cuda" and first.dtype != torch.float64:  # its step size is a float32
        _add_fused_(weights, direction, step)
        return
    for w, d in zip(weights, direction, strict=True):
        w.add_(_scaled(d, step, w.device).to(w.dtype))


def _scaled(d: Tensor, step: Tensor, device: torch.device) -> Tensor:
    """The move of one tensor, dense; zero if the step is zero, whatever the direction holds."""
    return masked_product(dense(d), step.to(device))


def _add_rounded_(weights: list[Tensor], direction: list[Tensor], step: Tensor, rounding: Rounding) -> set[int]:
    """Moves the tensors that have a grid, in one kernel if that is ready, else one by one; returns their indices."""
    chosen = [k for k, grid in enumerate(rounding.grids) if grid]
    done: set[int] = set()
    if step.device in rounding.generators and not is_recorded(step.device) and fused.is_ready(step.device):
        w, d = ([each[k] for k in chosen] for each in (weights, direction))
        taken = fused.add_(w, d, step, rounding.of(chosen).grids, _random_number(rounding, step.device))
        done = {chosen[k] for k in taken}
    for k in chosen:
        if k not in done:
            weights[k].copy_(_rounded(weights[k], direction[k], step, rounding, k))
    return set(chosen)


def _rounded(w: Tensor, d: Tensor, step: Tensor, rounding: Rounding, k: int) -> Tensor:
    grid = rounding.grids[k]
    assert grid is not None
    return add_rounded(w, _scaled(d.float(), step.float(), w.device), grid, rounding.generators[w.device])


def _random_number(rounding: Rounding, device: torch.device) -> Tensor:
    """The seed of the kernel's random bits: on the device, so that every replay draws a new one."""
    return torch.randint(2**62, (), generator=rounding.generators[device], device=device)


def _add_fused_(weights: list[Tensor], direction: list[Tensor], step: Tensor) -> None:
    """For dense tensors; a direction with other strides than its weight is copied first."""
    pairs = zip(weights, direction, strict=True)
    fused_ascent_(weights, [d if d.stride() == w.stride() else torch.empty_like(w).copy_(d) for w, d in pairs], step)
