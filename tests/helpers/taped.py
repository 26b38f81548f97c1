"""A simulated CUDA graph on the CPU: every operation of a step is recorded on a tape, and a replay runs the tape.

It has the properties of a graph that matter. A replay runs no Python of the step. It reads and writes the memory that
was recorded. Writes of the recording itself to older memory are undone. Kernels of ``deltasam.step.fused`` run only in
replays, when their table of addresses has been sent. An operation on an empty list of tensors raises, as on a GPU.

It cannot show synchronisation with the device, nor parallel branches.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from deltasam.methods import _base, _buffers, _esam
from deltasam.per_instance import ascent as _ascent
from deltasam.per_instance import recording as _record
from deltasam.per_instance.algebra import operations as _operations
from deltasam.speed.capture import _captured, _graph
from deltasam.speed.capture._streams import Needs
from deltasam.step import fused, moving
from deltasam.step.radius import _base as _radii
from deltasam.step.randomness import Seed
from deltasam.step.rounding import add_rounded


class Tape(TorchDispatchMode):
    """Records the operations that run inside."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.kernels = 0
        self.operations: list[tuple[str, tuple[Any, ...]]] = []  # names, and shapes of the arguments
        self._own: set[int] = set()  # storages made while recording
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "_foreach_" in func.__name__ and any(isinstance(arg, (list, tuple)) and not arg for arg in args):
            raise RuntimeError("Tensor list must have at least one tensor.")
        shapes = (leaf.shape for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
        self.operations.append((func.__name__, tuple(shapes)))
        # Aliases: a parameter that has other memory now has its own again when the tape is replayed.
        recorded = tree_map(_alias, (tuple(args), kwargs))
        given = dict(zip((a.name for a in func._schema.arguments), recorded[0], strict=False)) | recorded[1]
        for argument in func._schema.arguments:
            if argument.is_write and (value := given.get(argument.name)) is not None:
                foreign = [leaf for leaf in tree_flatten(value)[0] if _storage(leaf) not in self._own]
                self._overwritten += [(leaf, leaf.clone()) for leaf in foreign]
        out = func(*args, **kwargs)
        fresh = all(value.alias_info is None for value in func._schema.returns)
        places = [_alias(leaf) for leaf in tree_flatten(out)[0]] if fresh else []
        self._own.update(_storage(place) for place in places if isinstance(place, Tensor))
        self.launches.append(lambda: _again(func, recorded, places))
        return out

    def undo(self) -> None:
        """Restores the values of memory from before the recording."""
        for place, value in reversed(self._overwritten):
            place.copy_(value)
        self._overwritten.clear()

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for launch in self.launches:
                launch()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _again(func: Any, recorded: tuple[Any, Any], places: list[Any]) -> None:
    found = tree_flatten(func(*recorded[0], **recorded[1]))[0]
    for place, value in zip(places, found, strict=bool(places)):
        if isinstance(place, Tensor) and not place._is_zerotensor():  # those of forward mode, which have no memory
            place.copy_(value)


class Kernel:
    """Replaces the Triton kernel: gets a table of addresses, which is filled after the recording."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(table: Tensor, step: Tensor, seed: Tensor, number: int, **options: Any) -> None:
            assert Tape.current is not None
            Tape.current.kernels += 1
            Tape.current.launches.append(lambda: self.run(table, step, seed, number))

        return launch

    def run(self, table: Tensor, step: Tensor, seed: Tensor, number: int) -> None:
        _move(table, step, seed, number)


class MirroredKernel(Kernel):
    """Replaces the kernel for both sides of w."""

    def run(self, table: Tensor, step: Tensor, seed: Tensor, number: int) -> None:
        _move(table, step, seed, number)
        _, _, sizes, *addresses, _ = table.view(7, number).tolist()
        for size, *places in zip(sizes, *addresses, strict=True):
            w, d, out = _floats(size, places)
            d.copy_(w + (w - out))


def _move(table: Tensor, step: Tensor, seed: Tensor, number: int) -> None:
    _, _, sizes, *addresses, codes = table.view(7, number).tolist()
    grids: dict[int, Any] = {code: grid for grid, code in fused._CODES.items()}
    for size, *places, code in zip(sizes, *addresses, codes, strict=True):
        w, d, out = _floats(size, places)
        if float(step) == 0 or not code:
            out.copy_(w if float(step) == 0 else w + step * d)
        else:
            out.copy_(add_rounded(w, step * d, grids[code], torch.Generator().manual_seed(int(seed))))


def _floats(size: int, places: Sequence[int]) -> list[Tensor]:
    return [torch.frombuffer((ctypes.c_float * size).from_address(p), dtype=torch.float32) for p in places]


class Streams:
    """The streams of a recording: changes of the state of the CPU's generator are on the tape, too."""

    def __init__(self, needs: Needs) -> None:
        self._seeded = [(seed, torch.Generator(needs.device)) for seed in needs.seeds]
        self._next = iter(self._seeded)
        self._drawn: list[tuple[Callable[[int], Tensor], Tensor]] = []

    def make_room(self) -> None:
        """Draws are kept where they are made."""

    def register(self, graph: Any) -> None:
        pass

    @contextmanager
    def used(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        pass

    @contextmanager
    def aligned(self, step: int) -> Iterator[None]:
        for seed, generator in self._seeded:
            generator.manual_seed(replace(seed, step=step).value)
        for draw, place in self._drawn:
            place.copy_(draw(step))
        yield

    def starts(self) -> dict[str, Tensor]:
        place: dict[str, Tensor] = {}
        _launch(lambda: place.update(state=torch.get_rng_state()))
        return place

    ends = starts

    @contextmanager
    def extra(self, place: dict[str, Tensor]) -> Iterator[None]:
        own: dict[str, Tensor] = {}
        _launch(lambda: own.update(state=torch.get_rng_state()))
        _launch(lambda: torch.set_rng_state(place["state"]))
        try:
            yield
        finally:
            _launch(lambda: torch.set_rng_state(own["state"]))

    def drawn(self, draw: Callable[[int], Tensor]) -> Tensor:
        with _disable_current_modes():
            place = draw(0)
        self._drawn.append((draw, place))
        return place

    def generator(self, seed: Seed) -> torch.Generator:
        return next(self._next)[1]


def _launch(function: Callable[[], Any]) -> None:
    assert Tape.current is not None
    Tape.current.launches.append(function)


@contextmanager
def _recording(graph: Tape, **_: Any) -> Iterator[None]:
    Tape.current, state = graph, torch.get_rng_state()
    try:
        with graph:
            yield
    finally:
        Tape.current = None
        torch.set_rng_state(state)
        with torch.no_grad():
            graph.undo()


def is_recorded(device: torch.device) -> bool:
    return Tape.current is not None


def play_graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the CPU as a device with graphs."""
    faked = {
        "CUDAGraph": Tape,
        "graph": _recording,
        "synchronize": lambda device: None,
        "current_stream": lambda device: SimpleNamespace(wait_stream=lambda stream: None),
    }
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_captured, "Pool", lambda: SimpleNamespace(handle=None, stream=None))
    monkeypatch.setattr(_graph, "GraphStreams", Streams)
    monkeypatch.setattr(_graph, "is_ready", lambda device: True)
    monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    kernels = SimpleNamespace(move_kernel=Kernel(), mirrored_move_kernel=MirroredKernel(), tl=torch)
    monkeypatch.setitem(sys.modules, "deltasam.step.fused._kernel", kernels)
    monkeypatch.setattr(fused, "can_mirror", lambda device: True)
    for module in (moving, _base, _buffers, _esam, _ascent, _operations, _record, _radii):
        monkeypatch.setattr(module, "is_recorded", is_recorded)
    take = fused.Tables.take

    def on_the_host(self: fused.Tables, rows: Any) -> Any:
        with _disable_current_modes():
            return take(self, rows)

    monkeypatch.setattr(fused.Tables, "take", on_the_host)
    way = moving._way_to_move

    def recorded_way(params: list[nn.Parameter]) -> Any:
        return moving._recorded if is_recorded(params[0].device) else way(params)

    monkeypatch.setattr(moving, "_way_to_move", recorded_way)
