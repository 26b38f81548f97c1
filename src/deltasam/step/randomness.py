"""Every pass of a step sees the same random draws and the same buffers; only one pass has side effects on them.

With dropout drawn anew in every pass, the differences that SAM and delta-SAM look at are dropout noise (a thousand
times the signal, measured), and rho = 0 is not plain training. So the streams are rewound before every extra pass, and
restored after it: a step consumes the draws of plain training, and updates BatchNorm's statistics as often.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasam.step import numpy_stream, python_stream
from deltasam.step.draws import STREAMS, Use, are_equal, use_of
from deltasam.step.model_buffers import ModelBuffers
from deltasam.step.numpy_stream import NumpyState
from deltasam.step.python_stream import PythonState
from deltasam.step.structure import Structure

Randomness = Literal["shared", "independent"]

_device, _is_cpu = attrgetter("device"), attrgetter("is_cpu")


@dataclass(frozen=True)
class Seed:
    """The seed of a random direction: the user's seed, the number of the step, and the draw within the step.

    The parts are kept separately, so that a captured step can insert the number of the step that is replayed.
    """

    user: int
    step: int
    path: tuple[int, ...] = ()

    def child(self, *which: int) -> Seed:
        """The seed of one of several draws."""
        return Seed(self.user, self.step, (*self.path, *which))

    @property
    def value(self) -> int:
        """One number from all parts."""
        parts = (self.user, self.step, *self.path)
        minus_ones = sum(2**i for i, part in enumerate(parts) if part == -1)  # hash(-1) == hash(-2)
        return hash((*parts, 2**60 + minus_ones) if minus_ones else parts) & (2**63 - 1)


class Recording(Protocol):
    """Random streams of a step that is recorded for replay, in which states can be neither read nor set."""

    def has_draws(self) -> bool:
        """Whether the step draws from the streams."""

    def starts(self) -> Any:
        """Extra passes will start where the streams are now: returns this place."""

    def ends(self) -> Any:
        """The place where an extra pass ends, and others will start."""

    def extra(self, place: Any) -> AbstractContextManager[None]:
        """The streams of an extra pass that starts at a place."""

    def drawn(self, draw: Callable[[int], Tensor]) -> Tensor:
        """A tensor on the device that is ``draw(step)`` in every replay, with the number of its step."""

    def generator(self, seed: Seed) -> torch.Generator:
        """A generator that starts at the beginning of the seed's stream in every replay."""


class Observer(Protocol):
    """Observes what a step draws, in order to record the next one like it."""

    def replay_starts(self, start: RandomState) -> None:
        """Extra passes will start in this state."""

    def extra_pass(self, randomness: Randomness, start: RandomState) -> None:
        """An extra pass starts in this state."""

    def seeded(self, seed: Seed) -> None:
        """A generator with this seed is used."""


_recording: Recording | None = None
_observer: Observer | None = None


def is_observed() -> bool:
    """Whether this step is observed, in order to record the next one like it."""
    return _observer is not None


@contextmanager
def recorded(by: Recording) -> Iterator[None]:
    """Steps inside draw from these streams. One step is recorded at a time; methods do not notice."""
    global _recording  # noqa: PLW0603
    _recording = by
    try:
        yield
    finally:
        _recording = None


@contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Reports to the observer what the steps inside draw."""
    global _observer  # noqa: PLW0603
    _observer = by
    try:
        yield
    finally:
        _observer = None


def seeded_generator(device: torch.device, seed: Seed) -> torch.Generator:
    """A separate generator, so that the global streams (dropout, data order) do not advance."""
    if _recording is not None:
        return _recording.generator(seed)
    if _observer is not None:
        _observer.seeded(seed)
    return torch.Generator(device).manual_seed(seed.value)


def drawn_on_the_host(device: torch.device, draw: Callable[[int], Tensor], step: int) -> Tensor:
    """``draw(step)``, drawn on the host, on the device; a captured step replays with the draw of its own number."""
    return draw(step).to(device) if _recording is None else _recording.drawn(draw)


@dataclass(frozen=True)
class RandomState:
    """All random streams that a model can draw from: Python, NumPy (if loaded), torch on all devices, its own."""

    python: PythonState
    numpy: NumpyState | None
    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()

    @classmethod
    def now(
        cls,
        devices: Iterable[torch.device],
        generators: Iterable[torch.Generator] = (),
        earlier: tuple[PythonState | None, NumpyState | None] = (None, None),
    ) -> RandomState:
        """Reads the streams of the CPU, of the accelerators ``devices``, and of the model's ``generators``.

        ``earlier`` are states of Python's and NumPy's streams, which are not read again if they have not moved since.
        """
        return cls(
            python=python_stream.read(earlier[0]),
            numpy=numpy_stream.read(earlier[1]),
            cpu=torch.default_generator.get_state(),
            devices=tuple([(d, torch.get_device_module(d).get_rng_state(d)) for d in devices]),
            generators=tuple([(generator, generator.get_state()) for generator in generators]),
        )

    def agrees_on_the_host(self, other: RandomState, host: Set[str] = STREAMS) -> bool:
        """Whether nothing was drawn between the two states from the streams of the host.

        Of Python's and NumPy's streams only those in ``host`` count.
        """
        if not torch.equal(self.cpu, other.cpu) or ("python" in host and self.python.state != other.python.state):
            return False
        # If NumPy was loaded in between, there was no stream to draw from before.
        if self.numpy is None or other.numpy is None or "numpy" not in host:
            return True
        return are_equal(self.numpy.state, other.numpy.state)

    def agrees(self, other: RandomState, host: Set[str] = STREAMS) -> bool:
        """Whether nothing was drawn between the two states, on any device; ``host`` as above."""
        here, there = ([state for _, state in (*each.devices, *each.generators)] for each in (self, other))
        return self.agrees_on_the_host(other, host) and all(map(torch.equal, here, there))

    @property
    def host(self) -> tuple[PythonState, NumpyState | None]:
        """Python's and NumPy's streams."""
        return self.python, self.numpy

    def restore(self, host: Set[str] = STREAMS, current: RandomState | None = None) -> None:
        """Restores the streams to this state; of Python's and NumPy's only those in ``host``.

        ``current`` is the state in which they are, if the caller has just read it.
        """
        if "python" in host and (current is None or current.python is not self.python):
            self.python.restore()
        if self.numpy is not None and "numpy" in host and (current is None or current.numpy is not self.numpy):
            self.numpy.restore()
        torch.default_generator.set_state(self.cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.generators:
            generator.set_state(state)

    def fork(self, number: int, host: Set[str] = STREAMS) -> None:
        """Moves the streams to a state that depends on this one and on ``number``, without consuming draws."""
        source = torch.Generator()
        source.set_state(self.cpu)
        words = [int(torch.randint(2**62, (), generator=source, device="cpu"))]
        # The host's stream does not advance while dropout draws from another one, so all states are included.
        others = (*self.devices, *self.generators)
        words += [int(word) for _, state in others for word in state.view(torch.int64).tolist()]
        seed = hash((number, *words)) & (2**63 - 1)
        if "python" in host:
            random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy and "numpy" in host:
            numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        for device, _ in self.devices:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(seed)
        for k, (generator, _) in enumerate(self.generators):
            generator.manual_seed(hash((seed, k)) & (2**63 - 1))


class _Search(NamedTuple):
    """Where modules hold generators (``self.noise = torch.Generator()``), and the size of the model at that time."""

    size: tuple[int, int]
    places: tuple[tuple[int, str], ...]  # number of the module and name of the attribute
    is_repeated: bool


_SEARCHES: WeakKeyDictionary[nn.Module, _Search] = WeakKeyDictionary()


def generators_of(model: nn.Module, structure: Structure | None = None) -> tuple[torch.Generator, ...]:
    """The generators that are attributes of the model's modules, each once.

    All attributes are searched the first two times (a module may create its generator in the first pass), and again
    whenever modules or attributes were added or removed. ``structure`` is that of the model, if the caller has it.
    """
    structure = Structure(model) if structure is None else structure
    modules, size, last = structure.modules, structure.size, _SEARCHES.get(model)
    if last is not None and last.is_repeated and last.size == size:
        found = [vars(modules[k]).get(name) for k, name in last.places]
        if all(isinstance(each, torch.Generator) for each in found):
            return tuple(dict.fromkeys(found))
    attributes = ((k, name, value) for k, module in enumerate(modules) for name, value in vars(module).items())
    places = tuple((k, name) for k, name, value in attributes if isinstance(value, torch.Generator))
    _SEARCHES[model] = _Search(size, places, is_repeated=last is not None and last.size == size)
    return tuple(dict.fromkeys(vars(modules[k])[name] for k, name in places))


class Replay:
    """Remembers the state in which a step starts, so that its extra passes can start there, too.

    The pass at w runs inside :meth:`at_w`, which changes nothing. Every other pass runs inside :meth:`extra`, which
    rewinds the random streams and the buffers and restores both afterwards, also after an exception. With
    ``randomness="independent"`` extra passes draw from separate streams instead (and still consume nothing).

    Python's and NumPy's global streams are rewound only if the model draws from them or no other thread is alive, see
    :mod:`deltasam.step.draws`. With ``watch`` the state in which the first extra pass ends is kept for
    :meth:`following`.

    Cost: a copy of the buffers that change and of the generators' states (5 kB) per pass; no device synchronisation,
    except once per model if it has large buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Iterable[torch.device],
        randomness: Randomness = "shared",
        *,
        watch: bool = False,
        structure: Structure | None = None,
    ) -> None:
        self._watch = watch
        self._end: tuple[RandomState | None, Any, ModelBuffers] | None = None
        self._devices = tuple(devices)
        self._randomness = randomness
        structure = Structure(model) if structure is None else structure
        self._generators = () if _recording else generators_of(model, structure)
        self._use: Use = use_of(model, structure)
        self._start: RandomState | None = None
        if not _recording:
            self._start = RandomState.now(self._devices, self._generators, self._use.host_start)
        self._place = _recording.starts() if _recording else None
        if _observer is not None and self._start is not None:
            _observer.replay_starts(self._start)
        self._buffers = ModelBuffers(model, structure)
        self._extras = 0

    def _now(self) -> RandomState:
        assert self._start is not None
        return RandomState.now(self._devices, self._generators, self._start.host)

    def rewind(self) -> None:
        """Restores the random streams and the buffers to the start of the step."""
        if self._start is None:
            raise RuntimeError("a step that is being recorded cannot be restarted")
        self._start.restore(self._use.streams())
        self._buffers.restore()

    def following(self) -> Replay:
        """A replay that starts where the first extra pass of this one ended.

        Parts of a batch that are probed one by one then see the draws and buffers of one sweep over all of them.
        """
        if self._end is None:
            raise RuntimeError("no extra pass has been made with watch=True")
        other = copy(self)
        other._start, other._place, other._buffers = self._end
        other._extras, other._end = 0, None
        return other

    def at_w(self) -> AbstractContextManager[None]:
        """The pass at w. It also shows which streams the model draws from."""
        return nullcontext() if self._start is None else self._use.watched()

    def has_drawn(self) -> bool:
        """Whether a pass that started with this replay has drawn random numbers, which its other passes repeat.

        To be asked after the pass at w, or at the end of a pass inside :meth:`extra`. False if the passes draw from
        independent streams: then none repeats another's draws.
        """
        if self._start is None:
            assert _recording is not None, "the step outlived its recording"
            return _recording.has_draws()
        return self._randomness == "shared" and not self._now().agrees(self._start, self._use.streams())

    @contextmanager
    def extra(self) -> Iterator[None]:
        """One pass without side effects on the random streams and the buffers."""
        if self._start is None:
            assert _recording is not None, "the step outlived its recording"
            with _recording.extra(self._place), self._buffers.rewound():
                yield
                if self._watch and self._end is None:
                    self._end = None, _recording.ends(), self._buffers.following()
            return
        if _observer is not None:
            _observer.extra_pass(self._randomness, self._start)
        current, host = self._now(), self._use.streams()
        # A stream that the model draws from is read in every step, whatever its memory shows.
        (python, numpy), (python_start, numpy_start) = current.host, self._start.host
        self._use.host_start = python if python is python_start else None, numpy if numpy is numpy_start else None
        self._extras += 1
        try:
            if self._randomness == "shared":
                self._start.restore(host, current)
            else:
                self._start.fork(self._extras, host)
            with self._use.watched(), self._buffers.rewound():
                yield
                if self._watch and self._end is None:
                    self._end = self._now(), None, self._buffers.following()
        finally:
            current.restore(host | self._use.found())


def accelerators(values: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices of these tensors except the CPU, each once."""
    values = list(values)
    if all(map(_is_cpu, values)):
        return ()
    found = dict.fromkeys(map(_device, values))
    return tuple(device for device in found if device.type not in ("cpu", "meta"))
