"""One recorded step: fixed memory for inputs and outputs, and the graph between them."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deltasam._torch import foreach_copy_
from deltasam.methods import Step
from deltasam.speed.capture._constants import HostConstants, filled_numbers
from deltasam.speed.capture._key import NotCapturableError
from deltasam.speed.capture._streams import GraphStreams, Needs
from deltasam.step.batches import tensors, tree_map
from deltasam.step.counts import HostShares
from deltasam.step.fused import Tables, is_ready
from deltasam.step.radius import Numbers
from deltasam.step.randomness import recorded


class Pool:
    """Memory and a stream that the graphs of one :class:`~deltasam.speed.capture.Captured` share."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class Observed(NamedTuple):
    """What a recording needs to know of an ordinary step."""

    needs: Needs
    constants: HostConstants


class RecordedStep:
    """A step as a CUDA graph, for inputs of one shape. Raises a NotCapturableError if it cannot be recorded.

    Args:
        run: Runs the step on its inputs: fills ``.grad`` and returns the record.
        model: The model.
        inputs: Inputs of the shape; copied.
        observed: What an ordinary step of this shape drew at random, and copied from the host.
        pool: Shared with the other graphs.
        place: Memory for the gradients, by parameter name; None if an optimizer in the graph consumes them.
    """

    def __init__(
        self,
        run: Callable[[Any], Step],
        model: nn.Module,
        inputs: Any,
        observed: Observed,
        pool: Pool,
        place: dict[str, Tensor] | None,
    ) -> None:
        needs, self._constants = observed.needs, observed.constants  # the graph reads the memory of the constants
        self._inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        self._streams = GraphStreams(needs)
        self._graph = torch.cuda.CUDAGraph()
        self._tables = Tables(needs.device) if is_ready(needs.device) else None
        self._streams.register(self._graph)
        self._streams.make_room()
        self.placed: list[str] = []
        self.numbers: Numbers | None = None  # of the radius
        self.shares: HostShares | None = None  # of micro-batches, if the host counts them
        params = dict(model.named_parameters())
        kept = {name: p.grad for name, p in params.items()}
        torch.clear_autocast_cache()  # a recording would keep reading casts made before it
        try:
            for p in params.values():
                p.grad = None
            with (
                nullcontext() if self._tables is None else self._tables.open(),
                recorded(self._streams),
                self._streams.used(),
                filled_numbers(),
                self._constants.read(),
                _without_warnings(),
                torch.cuda.graph(self._graph, pool=pool.handle, stream=pool.stream),
            ):
                self._step = run(self._inputs)
                self._streams.finish()
                found = {name: p.grad for name, p in params.items() if p.grad is not None}
                if place is not None:
                    _copy_([place[name] for name in found], list(found.values()))
            # Torch sets the generators on the recording's own stream first: late, it would undo what a replay sets.
            torch.cuda.current_stream(needs.device).wait_stream(pool.stream)
            self.placed = [] if place is None else list(found)
        except Exception as error:
            torch.cuda.synchronize(needs.device)
            raise NotCapturableError(_obstacle(error)) from error
        finally:
            torch.clear_autocast_cache()
            for name, p in params.items():
                p.grad = kept[name]

    def replay(self, inputs: Any, steps: int) -> Step:
        """Copies the inputs in, replays the graph, and returns a copy of the step's record."""
        _copy_(list(tensors(self._inputs)), list(tensors(inputs)))
        with self._streams.aligned(steps):
            self._graph.replay()
        values: dict[str, Any] = {f.name: getattr(self._step, f.name) for f in dataclasses.fields(self._step)}
        values.update({name: value.clone() for name, value in values.items() if isinstance(value, Tensor)})
        return Step(**values)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside, torch does not warn of an empty graph: the step failed before its first operation, and says why."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


def _copy_(places: list[Tensor], values: list[Tensor]) -> None:
    if places:  # torch refuses an empty list
        foreach_copy_(places, values, non_blocking=True)


def _obstacle(error: Exception) -> str:
    """Where the recording failed: the innermost line outside torch, and the first line of the message."""
    while isinstance(error.__context__, Exception):  # ending a failed recording raises once more
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(str(Path(torch.__file__).parent))] or list(frames)
    message = (str(error) or type(error).__name__).splitlines()[0]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} `{(own[-1].line or '').strip()}` ({message})"
