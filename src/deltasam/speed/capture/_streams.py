"""Random streams of a recorded step: dropout is new in every replay and the same in all passes of one.

While a graph is recorded, the state of a CUDA generator can be neither read nor set, but it can be *exchanged* for
another state object. So every extra pass gets its own state, and before each replay all of them are set to the
position where their pass starts: they then draw what the pass at w draws. That position is the one of the default
generator, or, for the later ones of several micro-batches, as far ahead of it as in the ordinary step that was
observed. There the pass at w, too, goes on with a state that is set before the replay, so that the passes agree even
if the recorded kernels draw more or fewer numbers than the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from deltasam.step.randomness import Randomness, RandomState, Seed


class Needs:
    """The random streams that a recording needs, found by observing an ordinary step, or why it cannot be recorded.

    Attributes:
        starts: How far the default generator has come where extra passes will start, in the order of the step.
        extras: The same where each extra pass starts.
        length: How far it comes in the whole step.
        seeds: The seeds of other generators.
        obstacle: Why the step cannot be recorded, if so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.starts: list[int] = []
        self.extras: list[int] = []
        self.length = 0
        self.seeds: list[Seed] = []
        self.obstacle: str | None = None
        self._start = RandomState.now([device] if device.type != "cpu" else [])
        self._own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    def replay_starts(self, start: RandomState) -> None:
        """Remembers where extra passes will start."""
        self._own = self._own or start.generators
        self.starts.append(self._ahead(start))

    def extra_pass(self, randomness: Randomness, start: RandomState) -> None:
        """Remembers where an extra pass starts."""
        self.extras.append(self._ahead(start))
        if randomness == "independent":
            self.obstacle = "randomness='independent' draws from streams that are forked on the host"

    def seeded(self, seed: Seed) -> None:
        """Remembers the seed of a generator, in the order of their use."""
        self.seeds.append(seed)

    def finish(self) -> None:
        """Checks whether the step drew random numbers on the host, which every replay would repeat."""
        now = RandomState.now([device for device, _ in self._start.devices])
        self.length = self._ahead(now)
        if self.device.type != "cpu" and not now.agrees_on_the_host(self._start):
            self.obstacle = "it draws random numbers on the host (LayerDrop does), which a replay would repeat"
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._own):
            self.obstacle = "a module draws from its own torch.Generator, which a recording cannot reset"

    def _ahead(self, state: RandomState) -> int:
        """How far the generator of the device has come since the start of the step."""
        here = dict(state.devices)
        for device, before in self._start.devices:
            if device in here:
                (seed, offset), (first, start) = (each.view(torch.int64).tolist() for each in (here[device], before))
                if seed == first:
                    return int(offset - start)
                self.obstacle = "the random streams are seeded anew in the middle of the step"
        return 0


_ROOM, _ALIGNED = 2**16, 16  # bytes


class GraphStreams:
    """The states a graph draws from: the default generator's, one for every extra pass, one for every seed."""

    def __init__(self, needs: Needs) -> None:
        index = torch.cuda.current_device() if needs.device.index is None else needs.device.index
        self.default = torch.cuda.default_generators[index]
        self._own = self.default.graphsafe_get_state()
        self._main = self.default.clone_state()  # the state of the default generator during the recording
        self._starts = [(ahead, self.default.clone_state() if ahead else None) for ahead in needs.starts]
        self._extras = [(ahead, self.default.clone_state()) for ahead in needs.extras]
        self._seeded = [(seed, torch.Generator(needs.device)) for seed in needs.seeds]
        # Where a later part has a state of its own, the main one does not get to the end of the step.
        self._length = needs.length if any(needs.starts) else None
        self._has_draws = needs.length > 0
        self._drawn: list[tuple[Callable[[int], Tensor], Tensor]] = []
        self._device = needs.device
        self._room = torch.empty(0, dtype=torch.uint8)
        self._next_start = iter(self._starts)
        self._next_extra = iter(self._extras)
        self._next_seeded = iter(self._seeded)

    def _aligned(self) -> list[tuple[int, torch.Generator]]:
        others = [(ahead, state) for ahead, state in (*self._starts, *self._extras) if state is not None]
        return [(0, self._main), *others]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Registers these states with the graph, which advances them in every replay."""
        states = [state for _, state in self._aligned()[1:]]  # torch registers that of the default generator itself
        for state in (*states, *(generator for _, generator in self._seeded)):
            graph.register_generator_state(state)

    def make_room(self) -> None:
        """Memory for draws of the host, made before the recording: its pool shares memory with earlier passes."""
        self._room = torch.empty(_ROOM, dtype=torch.uint8, device=self._device)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a recording, which has a state instead of the default generator's own.

        A failed recording leaves the states that it used unusable, and the default generator's own is in use outside.
        """
        self.default.graphsafe_set_state(self._main)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(self._own)

    def finish(self) -> None:
        """The last thing in a recording: the default generator has the state again that it began with."""
        self.default.graphsafe_set_state(self._main)

    @contextmanager
    def aligned(self, step: int) -> Iterator[None]:
        """Around a replay: passes start where the pass at w starts, seeds and draws are those of this step."""
        seed, offset = self.default.initial_seed(), self.default.get_offset()
        for ahead, state in self._aligned():
            state.manual_seed(seed)
            state.set_offset(offset + ahead)
        for one, generator in self._seeded:
            generator.manual_seed(replace(one, step=step).value)
        for draw, place in self._drawn:
            place.copy_(draw(step).pin_memory(), non_blocking=True)
        yield
        self.default.set_offset(self._main.get_offset() if self._length is None else offset + self._length)

    def has_draws(self) -> bool:
        """Whether the ordinary step drew from the default generator."""
        return self._has_draws

    def starts(self) -> None:
        """From here on, the pass draws from a state that extra passes can start with, too."""
        _, state = next(self._next_start)
        if state is not None:
            self.default.graphsafe_set_state(state)

    def ends(self) -> None:
        """Extra passes are in the order of the ordinary step, which knows where each of them starts."""

    @contextmanager
    def extra(self, place: None) -> Iterator[None]:
        """An extra pass inside the recording."""
        own = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(next(self._next_extra)[1])
        try:
            yield
        finally:
            self.default.graphsafe_set_state(own)

    def drawn(self, draw: Callable[[int], Tensor]) -> Tensor:
        """Memory that is filled before every replay; the graph keeps it as long as this object does."""
        like = draw(0)
        size = -(-like.nbytes // _ALIGNED) * _ALIGNED
        if size > self._room.numel():
            raise RuntimeError(f"the host draws more than {_ROOM} bytes")
        place = self._room[: like.nbytes].view(like.dtype).view(like.shape)
        self._room = self._room[size:]
        self._drawn.append((draw, place))
        return place

    def generator(self, seed: Seed) -> torch.Generator:
        """The next of the seeded generators, in the order of the ordinary step."""
        return next(self._next_seeded)[1]
