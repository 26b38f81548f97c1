"""Random streams of a recorded step: dropout is new in every replay and the same in all passes of one.

While a graph is recorded, the state of a CUDA generator can be neither read nor set, but it can be *exchanged* for
another state object. So every extra pass gets its own state, and before each replay all of them are set to the
position of the default generator: they then draw what the pass at w draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from deltasam.step.randomness import Randomness, RandomState, Seed


class Needs:
    """The random streams that a recording needs, found by observing an ordinary step, or why it cannot be recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extras = 0
        self.seeds: list[Seed] = []
        self.obstacle: str | None = None
        self._start = RandomState.now([device] if device.type != "cpu" else [])
        self._own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    def replay_starts(self, start: RandomState) -> None:
        """Checks that extra passes start where the step starts: there, replays align the states of all passes."""
        self._own = self._own or start.generators
        here = dict(start.devices)
        for device, state in self._start.devices:
            if device in here and not torch.equal(here[device], state):
                self.obstacle = "a pass is repeated from the middle of the step's random draws (micro-batches do that)"

    def extra_pass(self, randomness: Randomness) -> None:
        """Counts an extra pass."""
        self.extras += 1
        if randomness == "independent":
            self.obstacle = "randomness='independent' draws from streams that are forked on the host"

    def seeded(self, seed: Seed) -> None:
        """Remembers the seed of a generator, in the order of their use."""
        self.seeds.append(seed)

    def finish(self) -> None:
        """Checks whether the step drew random numbers on the host, which every replay would repeat."""
        if self.device.type != "cpu" and not RandomState.now([]).agrees_on_the_host(self._start):
            self.obstacle = "it draws random numbers on the host (LayerDrop does), which a replay would repeat"
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._own):
            self.obstacle = "a module draws from its own torch.Generator, which a recording cannot reset"


class GraphStreams:
    """The states a graph draws from: the default generator's, one for every extra pass, one for every seed."""

    def __init__(self, needs: Needs) -> None:
        index = torch.cuda.current_device() if needs.device.index is None else needs.device.index
        self.default = torch.cuda.default_generators[index]
        self._extras = [self.default.clone_state() for _ in range(needs.extras)]
        self._seeded = [(seed, torch.Generator(needs.device)) for seed in needs.seeds]
        self._next_extra = iter(self._extras)
        self._next_seeded = iter(self._seeded)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Registers these states with the graph, which advances them in every replay."""
        for state in (*self._extras, *(generator for _, generator in self._seeded)):
            graph.register_generator_state(state)

    def align(self, step: int) -> None:
        """Before a replay: extra passes start where the pass at w starts, seeds are those of this step."""
        seed, offset = self.default.initial_seed(), self.default.get_offset()
        for state in self._extras:
            state.manual_seed(seed)
            state.set_offset(offset)
        for one, generator in self._seeded:
            generator.manual_seed(replace(one, step=step).value)

    @contextmanager
    def extra(self) -> Iterator[None]:
        """An extra pass inside the recording."""
        own = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(next(self._next_extra))
        try:
            yield
        finally:
            self.default.graphsafe_set_state(own)

    def generator(self, seed: Seed) -> torch.Generator:
        """The next of the seeded generators, in the order of the ordinary step."""
        return next(self._next_seeded)[1]
