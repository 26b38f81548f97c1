"""One recorded step: fixed places for what goes in and comes out, and the graph between them."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import foreach_copy_
from deltasam.methods import Step
from deltasam.speed.capture._constants import filled_constants
from deltasam.speed.capture._key import NotCapturableError
from deltasam.speed.capture._streams import GraphStreams, Needs
from deltasam.step.batches import tensors, tree_map
from deltasam.step.fused import Tables, is_ready
from deltasam.step.randomness import recorded


class Pool:
    """Memory and a stream that the graphs of one :class:`~deltasam.speed.capture.Captured` share."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()


class RecordedStep:
    """A step as a CUDA graph, for inputs of one shape.

    Args:
        run: Takes the step for its inputs: fills ``.grad`` and returns what happened.
        model: The model.
        inputs: Inputs of the shape; copied.
        needs: What an ordinary step of this shape was seen to draw.
        pool: Shared with the other graphs.
        place: Where the gradients go, by parameter name; None leaves them inside, for an optimizer in the graph.

    Raises:
        NotCapturableError: The step does something that cannot be recorded.
    """

    def __init__(
        self,
        run: Callable[[Any], Step],
        model: nn.Module,
        inputs: Any,
        needs: Needs,
        pool: Pool,
        place: dict[str, Tensor] | None,
    ) -> None:
        self._inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        self._streams = GraphStreams(needs)
        self._graph = torch.cuda.CUDAGraph()
        self._tables = Tables(needs.device) if is_ready(needs.device) else None
        self._streams.register(self._graph)
        self.placed: list[str] = []
        params = dict(model.named_parameters())
        kept = {name: p.grad for name, p in params.items()}
        default = self._streams.default
        spare = default.clone_state()
        torch.clear_autocast_cache()  # casts made before the recording would be read by it for ever
        try:
            for p in params.values():
                p.grad = None
            with (
                nullcontext() if self._tables is None else self._tables.open(),
                recorded(self._streams),
                filled_constants(),
                torch.cuda.graph(self._graph, pool=pool.handle, stream=pool.stream),
            ):
                self._step = run(self._inputs)
                found = {name: p.grad for name, p in params.items() if p.grad is not None}
                if place is not None:
                    _copy_([place[name] for name in found], list(found.values()))
            self.placed = [] if place is None else list(found)
        except Exception as error:
            torch.cuda.synchronize(needs.device)
            # A recording that broke off leaves the generator's state unusable outside of one.
            default.graphsafe_set_state(spare)
            raise NotCapturableError(_obstacle(error)) from error
        finally:
            torch.clear_autocast_cache()
            for name, p in params.items():
                p.grad = kept[name]

    def replay(self, inputs: Any, steps: int) -> Step:
        """Copies the inputs in, replays the graph, and returns what happened, in memory of its own."""
        _copy_(list(tensors(self._inputs)), list(tensors(inputs)))
        self._streams.align(steps)
        self._graph.replay()
        values = {f.name: getattr(self._step, f.name) for f in dataclasses.fields(self._step)}
        own: dict[str, Any] = {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}
        return Step(**own)


def _copy_(places: list[Tensor], values: list[Tensor]) -> None:
    if places:  # torch refuses an empty list
        foreach_copy_(places, values, non_blocking=True)


def _obstacle(error: Exception) -> str:
    """Where the recording broke: the innermost line that is not torch's own, and the first line of the message."""
    while isinstance(error.__context__, Exception):  # ending a broken recording raises once more
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(str(Path(torch.__file__).parent))] or list(frames)
    message = (str(error) or type(error).__name__).splitlines()[0]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} `{(own[-1].line or '').strip()}` ({message})"
