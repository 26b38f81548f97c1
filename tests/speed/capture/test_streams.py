"""The states of a recorded step: every pass starts where its part of the step starts, whatever the kernels draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deltasam.speed.capture._streams import GraphStreams, Needs
from deltasam.step.randomness import RandomState


@dataclass
class State:
    seed: int
    offset: int


class Generator:
    """A CUDA generator without CUDA: a handle of a state that can be exchanged."""

    def __init__(self, state: State) -> None:
        self.state = state

    def clone_state(self) -> Generator:
        return Generator(dataclasses.replace(self.state))

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state

    def initial_seed(self) -> int:
        return self.state.seed

    def get_offset(self) -> int:
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        self.state.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.state.seed, self.state.offset = seed, 0


class Graph:
    """Advances the states that were drawn from while it was recorded."""

    def __init__(self, default: Generator) -> None:
        self._default, self._draws, self._known = default, [], [default.state]

    def register_generator_state(self, state: Generator) -> None:
        self._known.append(state.state)

    def draw(self, name: str, amount: int) -> None:
        assert any(self._default.state is known for known in self._known)
        self._draws.append((name, self._default.state, amount))

    def replay(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, state, amount in self._draws:
            found[name] = (state.seed, state.offset)
            state.offset += amount
        return found


@pytest.mark.parametrize("amount", [12, 20], ids=["as the ordinary step", "more than the ordinary step"])
def test_the_passes_of_a_part_start_together(monkeypatch: pytest.MonkeyPatch, amount: int) -> None:
    default = Generator(State(seed=7, offset=100))
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    needs = Needs(torch.device("cpu"))
    needs.device = torch.device("cuda", 0)
    # An ordinary step over three parts, each with an extra pass, which draws 12 numbers for each.
    needs.starts, needs.extras, needs.length = [0, 12, 24], [0, 12, 24], 36
    streams, own = GraphStreams(needs), default.state
    assert streams.has_draws()
    with streams.used():
        graph = Graph(default)
        streams.register(graph)  # type: ignore[arg-type]
        for part in range(3):
            place: Any = streams.starts()
            graph.draw(f"{part} at w", amount)
            with streams.extra(place):
                graph.draw(f"{part} perturbed", amount)
        streams.finish()
    assert default.state is own
    for start in (100, 136, 172):
        assert default.get_offset() == start
        with streams.aligned(step=0):
            found = graph.replay()
        for part in range(3):
            assert found[f"{part} at w"] == found[f"{part} perturbed"] == (7, start + 12 * part)


def test_a_single_batch_advances_the_default_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Generator(State(seed=7, offset=100))
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    needs = Needs(torch.device("cpu"))
    needs.device = torch.device("cuda", 0)
    needs.starts, needs.extras, needs.length = [0], [0], 12
    streams = GraphStreams(needs)
    with streams.used():
        graph = Graph(default)
        streams.register(graph)  # type: ignore[arg-type]
        place: Any = streams.starts()
        graph.draw("at w", 20)
        with streams.extra(place):
            graph.draw("perturbed", 20)
        streams.finish()
    with streams.aligned(step=0):
        assert graph.replay() == {"at w": (7, 100), "perturbed": (7, 100)}
    assert default.get_offset() == 120


def test_a_failed_recording_does_not_touch_the_state_of_the_default_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = Generator(own := State(seed=7, offset=100))
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    needs = Needs(torch.device("cpu"))
    needs.device = torch.device("cuda", 0)
    streams = GraphStreams(needs)
    assert not streams.has_draws()
    with pytest.raises(KeyError), streams.used():
        raise KeyError if default.state is not own else AssertionError
    assert default.state is own


def state(seed: int, offset: int) -> RandomState:
    words = torch.tensor([seed, offset]).view(torch.uint8)
    return dataclasses.replace(RandomState.now([]), devices=((torch.device("cuda", 0), words),))


def test_needs_know_how_far_the_step_has_come() -> None:
    needs = Needs(torch.device("cpu"))
    needs._start = state(7, 100)
    needs.replay_starts(state(7, 100))
    needs.extra_pass("shared", state(7, 100))
    needs.replay_starts(state(7, 112))
    needs.extra_pass("shared", state(7, 112))
    assert (needs.starts, needs.extras, needs.obstacle) == ([0, 12], [0, 12], None)
    needs.replay_starts(state(8, 0))
    assert "seeded anew" in str(needs.obstacle)
