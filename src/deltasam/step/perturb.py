"""Which parameters, which norm, and the move to w + eps that always moves back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import islice, repeat
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deltasam._torch import foreach_copy_, foreach_lerp, foreach_lerp_, foreach_norm, fused_ascent_
from deltasam.parallel.distributed import is_shard, local, shard_like, shard_number, total
from deltasam.step import fused
from deltasam.step.branches import is_recorded
from deltasam.step.randomness import Seed, seeded_generator
from deltasam.step.rounding import STORED, Grid, Rounding, add_rounded

_ALIGNED = 16  # elements
_STRETCH = 2**16  # elements that float32 can add up one after the other
Preset = Literal["all", "no-embeddings", "no-bias-norm", "norms", "lora"]
Selection = Preset | Callable[[str, nn.Parameter], bool]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take gradients, by name; a tied parameter is listed once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def select(
    model: nn.Module, which: Selection = "all", among: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """The trainable parameters that a method may perturb.

    Args:
        model: The model.
        which: ``"all"``; ``"no-embeddings"``: all but the tables of ``nn.Embedding`` (tied heads included);
            ``"no-bias-norm"``: neither biases nor the parameters of normalisation layers; ``"norms"``: only those of
            normalisation layers; ``"lora"``: only adapters; or a predicate ``(name, parameter) -> bool``.
        among: The trainable parameters, if they are at hand.

    Returns:
        The chosen parameters by name.

    Raises:
        ValueError: Nothing is trainable, nothing was chosen, or the preset is unknown.

    Example:
        >>> list(select(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "norms"))
        ['1.weight', '1.bias']
    """
    params = trainable(model) if among is None else among
    if not params:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: set requires_grad=True on some")
    if which == "all":
        return params
    wanted = _predicate(model, which)
    chosen = {name: p for name, p in params.items() if wanted(name, p)}
    if not chosen:
        example = next(iter(params))
        raise ValueError(f"params={which!r} chose none of the {len(params)} trainable parameters, e.g. {example!r}")
    return chosen


def _predicate(model: nn.Module, which: Selection) -> Callable[[str, nn.Parameter], bool]:
    if callable(which):
        return which
    if which == "lora":
        return lambda name, p: "lora_" in name
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    if which == "no-embeddings":
        return lambda name, p: id(p) not in tables
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    if which == "no-bias-norm":
        return lambda name, p: id(p) not in norms and not _is_bias(name)
    if which == "norms":
        return lambda name, p: id(p) in norms
    raise ValueError(f"params={which!r} is none of {get_args(Preset)} and no predicate (name, parameter) -> bool")


def _is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("bias") or last.startswith("bias_")  # bias_ih_l0 of a recurrent layer, bias_k of attention


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, shards of other processes included.

    It is accumulated in float32 at least, on the first one's device, to a relative error of a few 1e-6 however many
    entries there are.
    """
    if not tensors:
        return torch.zeros((), device="cpu")
    values = [t.coalesce().values() if t.is_sparse else local(t) for t in tensors]
    norms = _norms(values, _wide_enough(values))
    if any(is_shard(t) for t in tensors):
        return total([(n.square(), t) for n, t in zip(norms, tensors, strict=True)]).sqrt()
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return norm


def _wide_enough(tensors: Sequence[Tensor]) -> torch.dtype:
    """A dtype that holds the values of all tensors, float32 at least: the parts of a model may differ in theirs."""
    return reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor.

    On a CPU torch adds the squares of a float32 tensor one after the other: over the 23 million entries of BERT's word
    embeddings the norm loses 0.3%, over 100 million 3%. Large ones are taken there in stretches (views, no copy).
    """
    if not any(_is_long(t) for t in tensors):
        return list(foreach_norm(tensors, 2, dtype=dtype))
    pieces = [_stretches(t) for t in tensors]
    norms = iter(foreach_norm([piece for each in pieces for piece in each], 2, dtype=dtype))
    found = [list(islice(norms, len(each))) for each in pieces]
    return [each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each)) for each in found]


def _is_long(tensor: Tensor) -> bool:
    return tensor.numel() > _STRETCH and tensor.is_cpu


def _stretches(tensor: Tensor) -> tuple[Tensor, ...]:
    if not _is_long(tensor):
        return (tensor,)
    longest = max(tensor.shape)
    return torch.split(tensor, max(1, _STRETCH * longest // tensor.numel()), tensor.shape.index(longest))


def dot(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> Tensor:
    """The inner product of two lists of tensors, shards of other processes included; None is zero."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return torch.zeros((), device="cpu")
    dtype = _wide_enough([a for a, _ in pairs])
    return total([((_dense(local(a)).to(dtype) * _dense(local(b)).to(dtype)).sum(), a) for a, b in pairs])


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def combine(a: Tensor, first: Tensor | None, b: Tensor, second: Tensor | None) -> Tensor | None:
    """``a * first + b * second`` with scalars a and b; None is zero, and so is a term whose factor is exactly zero.

    The last keeps a gradient that is not finite out of the sum when the method has decided not to use it. What is
    sparse in both stays sparse.
    """
    terms = [_times(factor, value) for factor, value in ((a, first), (b, second)) if value is not None]
    terms.sort(key=lambda term: term.is_sparse)  # torch adds a sparse tensor to a dense one, not the other way round
    return sum(terms[1:], start=terms[0]) if terms else None


def _times(factor: Tensor, value: Tensor) -> Tensor:
    if value.is_sparse:
        value = value.coalesce()
        scaled = _times(factor, value.values())
        return torch.sparse_coo_tensor(value.indices(), scaled, value.shape, is_coalesced=True, check_invariants=False)
    here = factor.to(value.device, value.dtype)
    return torch.where(here == 0, torch.zeros_like(value), here * value)


def random_direction(params: Sequence[Tensor], seed: Seed) -> list[Tensor]:
    """A direction r ~ N(0, I), one tensor per parameter, the same for the same seed on the same kind of device.

    All parameters of a device and dtype are drawn in one call, into one stretch of memory of which the tensors are
    views (aligned for vectorised kernels). Processes that hold the same parameters draw the same numbers; of sharded
    ones each draws its own part. Float64 gets float32's numbers: precisions can be compared along one r.
    """
    direction: list[Tensor | None] = [None] * len(params)
    here = [local(p) for p in params]
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, p in enumerate(params):
        kinds.setdefault((p.device, p.dtype, *shard_number(p)), []).append(i)
    for number, ((device, dtype, *shard), members) in enumerate(kinds.items()):
        sizes = [-(-here[i].numel() // _ALIGNED) * _ALIGNED for i in members]
        drawn = torch.empty(sum(sizes), device=device, dtype=torch.float32 if dtype is torch.float64 else dtype)
        flat = drawn.normal_(generator=seeded_generator(device, seed.child(number, *shard))).to(dtype)
        for i, stretch in zip(members, torch.split(flat, sizes), strict=True):
            direction[i] = shard_like(stretch[: here[i].numel()].view(here[i].shape), params[i])
    return [r for r in direction if r is not None]


@dataclass(frozen=True)
class Ascent:
    """A move to w + eps.

    Attributes:
        norm: The norm of the gradient that it follows, unscaled.
        skipped: Whether there was none to follow.
        arrived: The share of the move that arrived, if it was measured.
    """

    norm: Tensor
    skipped: Tensor
    arrived: Tensor | None = None


class Moved:
    """Parameters away from w. :meth:`mirror` takes them to the other side; leaving the context takes them back."""

    def __init__(self, params: Sequence[nn.Parameter], origin: Sequence[Tensor]) -> None:
        self._params = params
        self._origin = origin

    def pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every moved parameter with its value at w; of a sharded one the part that lies here."""
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


class _MovedBeside(Moved):
    """As :class:`Moved`, but w - eps lies beside w + eps: a pass there may not have run yet."""

    def _mirror(self, values: list[Tensor]) -> None:
        mirrored = foreach_lerp(values, list(self._origin), 2.0)
        for p, value in zip(self._params, mirrored, strict=True):
            p.data = value


@contextmanager
def perturbed(
    params: Sequence[nn.Parameter],
    direction: Sequence[Tensor | None],
    step: Tensor,
    *,
    consume: bool = True,
    grids: Sequence[Grid | None] | None = None,
    seed: Seed = Seed(0, 0),  # noqa: B008 - a frozen record
) -> Iterator[Moved]:
    """Moves the parameters to ``w + step * direction`` and back to w, bit for bit, whatever happens inside.

    Where the weights are used, or stored, in fewer bits than the move needs, it is rounded stochastically, see
    :mod:`deltasam.step.rounding`.

    Extra memory: one copy of the moved parameters. On the CPU the parameters borrow other memory for the while, and
    nothing has to come back. Elsewhere the values change in place (compiled and sharded models hold the addresses),
    and come back from a copy; while a CUDA graph is recorded the copy is what moves, nothing has to come back, and
    the other side of w is a second copy.

    The direction is never written to: it may be memory of the user's (a gradient that a hook keeps, a buffer that a
    custom function returns as its gradient), and gradients of several parameters may be views into one tensor.

    Args:
        params: The parameters to move.
        direction: One tensor per parameter; None leaves it where it is.
        step: A scalar tensor. Zero (a gradient that was not finite) moves nothing, whatever the direction holds.
        consume: The direction is given away: the list is emptied, so that its memory can be freed.
        grids: What the parameters are used in, None where that is float32. What is stored in half precision is rounded
            to that in any case.
        seed: Where the random bits of the rounding come from.

    Yields:
        A handle that can :meth:`~Moved.mirror` the move.
    """
    grids = [None] * len(params) if grids is None else grids
    chosen = [k for k, d in enumerate(direction) if d is not None]
    moved = [params[k] for k in chosen]
    given = [d for d in direction if d is not None]
    if consume and isinstance(direction, list):
        direction.clear()
    with _way(moved)(moved, given, step, _rounding(moved, [grids[k] for k in chosen], seed)) as handle:
        yield handle


def _rounding(params: list[nn.Parameter], grids: list[Grid | None], seed: Seed) -> Rounding | None:
    """How to round a move of these parameters; None where none of them needs it.

    Processes that hold the same parameters round alike; of sharded ones each has random bits of its own.
    """
    grids = [STORED.get(p.dtype, grid) for p, grid in zip(params, grids, strict=True)]
    if not any(grids):
        return None
    shards = {local(p.data).device: shard_number(p) for p, grid in zip(params, grids, strict=True) if grid}
    generators = {
        device: seeded_generator(device, seed.child(number, *shard))
        for number, (device, shard) in enumerate(shards.items())
    }
    return Rounding(grids, generators)


def _way(params: list[nn.Parameter]) -> Callable[..., AbstractContextManager[Moved]]:
    """How to move these parameters."""
    if any(type(p.data) is not Tensor for p in params):
        return _in_place  # shards
    if all(p.device.type == "cpu" for p in params):
        return _borrowed
    return _beside if all(is_recorded(p.device) for p in params) else _in_place


@contextmanager
def _borrowed(
    params: list[nn.Parameter], direction: list[Tensor], step: Tensor, rounding: Rounding | None = None
) -> Iterator[Moved]:
    size = float(step)  # the value is on the host already: nothing waits
    values = [p.data for p in params]
    direction.reverse()  # taken from the end, so that what is used up is freed one by one
    with torch.no_grad():
        for k, w in enumerate(values):
            d = direction.pop()
            if size == 0:  # keeps what is not finite in the direction out of the weights
                continue
            if rounding is None or rounding.grids[k] is None:
                values[k] = torch.add(w, d, alpha=size)
            else:
                values[k] = _rounded(w, d, step, rounding, k)
            del d
    with _lent(params, values) as moved:
        yield moved


@contextmanager
def _lent(params: list[nn.Parameter], values: list[Tensor], kind: type[Moved] = Moved) -> Iterator[Moved]:
    """The parameters hold other tensors for the while; the memory of their own is not touched."""
    origin = [p.data for p in params]
    back = map(setattr, params, repeat("data"), origin)
    try:
        for p, value in zip(params, values, strict=True):
            p.data = value
        torch.clear_autocast_cache()  # autocast remembers its casts of the weights by parameter, not by value
        yield kind(params, origin)
    finally:
        deque(back, maxlen=0)  # one call: an interruption (Ctrl-C) finds all of them moved or none
        torch.clear_autocast_cache()


@contextmanager
def _in_place(
    params: list[nn.Parameter], direction: list[Tensor], step: Tensor, rounding: Rounding | None = None
) -> Iterator[Moved]:
    weights = [local(p.data) for p in params]
    direction[:] = [local(d) for d in direction]
    origin = _copies(weights)
    try:
        with torch.no_grad():
            add_scaled_(weights, direction, step, rounding)
        direction.clear()  # during the passes at w + eps one copy of the parameters is held, not two
        torch.clear_autocast_cache()
        yield Moved(params, origin)
    finally:
        foreach_copy_(weights, origin)  # first, and one call, as above; neither has a graph
        torch.clear_autocast_cache()


@contextmanager
def _beside(
    params: list[nn.Parameter], direction: list[Tensor], step: Tensor, rounding: Rounding | None = None
) -> Iterator[Moved]:
    """For a step that is being recorded: its kernels take whatever addresses they see, so nothing is copied back."""
    weights = [p.data for p in params]
    with torch.no_grad():
        if rounding is None or step.device not in rounding.generators:
            made = fused.moved(weights, direction, step)
        else:
            made = fused.moved(weights, direction, step, rounding.grids, _random_number(rounding, step.device))
        rest = [k for k, value in enumerate(made) if value is None]
        copies = _copies([weights[k] for k in rest])
        add_scaled_(copies, [direction[k] for k in rest], step, None if rounding is None else rounding.of(rest))
    direction.clear()
    for k, copy in zip(rest, copies, strict=True):
        made[k] = copy
    with _lent(params, [value for value in made if value is not None], _MovedBeside) as moved:
        yield moved


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all tensors, in few kernels where the device has them."""
    if not tensors:  # the fused kernel took all of them; torch refuses an empty list
        return []
    made = [torch.empty_like(t) for t in tensors]
    with torch.no_grad():
        foreach_copy_(made, tensors)
    return made


def add_scaled_(
    weights: list[Tensor], direction: list[Tensor], step: Tensor, rounding: Rounding | None = None
) -> None:
    """``weights += step * direction`` in place; a zero step changes nothing, even where the direction is not finite.

    No host synchronisation. Dense tensors of one dtype and device take a single fused kernel: Triton's, or, where
    nothing is rounded, the plain SGD step of ``torch.optim.SGD(fused=True)``, whose ``found_inf`` is exactly this
    guard.
    """
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
    """The move of one tensor, dense; zero where the step is, whatever the direction holds."""
    dense, here = _dense(d), step.to(device)
    return torch.where(here == 0, torch.zeros_like(dense), dense * here)


def _add_rounded_(weights: list[Tensor], direction: list[Tensor], step: Tensor, rounding: Rounding) -> set[int]:
    """Moves what has a grid, in one kernel if that is ready and else one by one; returns which tensors that were."""
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
    """A tensor moved and rounded."""
    grid = rounding.grids[k]
    assert grid is not None
    return add_rounded(w, _scaled(d.float(), step.float(), w.device), grid, rounding.generators[w.device])


def _random_number(rounding: Rounding, device: torch.device) -> Tensor:
    """What the kernel makes its random bits of: on the device, so that a replay has a new one."""
    return torch.randint(2**62, (), generator=rounding.generators[device], device=device)


def _add_fused_(weights: list[Tensor], direction: list[Tensor], step: Tensor) -> None:
    """:func:`add_scaled_` for dense tensors; a direction with other strides than its weight is copied first."""
    pairs = zip(weights, direction, strict=True)
    fused_ascent_(weights, [d if d.stride() == w.stride() else torch.empty_like(w).copy_(d) for w, d in pairs], step)


def step_size(rho: float, norm: Tensor) -> Tensor:
    """The radius over the norm; 0 where the norm is zero, not finite, or too small to divide by."""
    size = rho / norm
    return torch.where(torch.isfinite(size) & torch.isfinite(norm), size, torch.zeros_like(size))
