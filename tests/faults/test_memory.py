"""Memory runs out in any pass of any method: the weights are unchanged, and the message gives advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.problems import TRANSFORMER
from helpers.promises import snapshot
from helpers.rows import ROWS, Row


class Hungry:
    """An objective that runs out of memory in one of its calls."""

    def __init__(self, objective: Any, at: int, error: type[RuntimeError], text: str) -> None:
        self.objective, self.at, self.error, self.text, self.calls = objective, at, error, text, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise self.error(self.text)
        return self.objective(model, batch)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_weights_and_message(row: Row, at: int) -> None:
    model, batch, objective = TRANSFORMER.make()
    before = snapshot(model)
    hungry = Hungry(objective, at, torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB")
    method = row.method()
    raised: BaseException | None = None
    try:
        method.backward(model, batch, row.wrap(hungry))
    except torch.OutOfMemoryError as error:
        raised = error
    assert (raised is None) == (hungry.calls < at)
    if raised is not None:
        message = str(raised)
        assert message.startswith("CUDA out of memory.")  # tools that halve the batch look for it
        assert f"{type(method).__name__} ran out of memory in pass" in message
        assert "MicroBatches" in message
        assert isinstance(raised.__cause__, torch.OutOfMemoryError)
    after = snapshot(model)
    assert all(torch.equal(before["weights"][name], after["weights"][name]) for name in before["weights"])
    assert {key: value for key, value in before.items() if key != "weights"} == {
        key: value for key, value in after.items() if key != "weights"
    }
    method.backward(model, batch, row.wrap(objective))  # and the next step works


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
        "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate ...",
        "std::bad_alloc",
    ],
)
def test_host_memory(text: str) -> None:
    model, batch, objective = TRANSFORMER.make()
    with pytest.raises(torch.OutOfMemoryError, match="in pass 2 of a step"):
        ROWS[1].method().backward(model, batch, Hungry(objective, 2, RuntimeError, text))


def test_other_errors_are_unchanged() -> None:
    model, batch, objective = TRANSFORMER.make()
    with pytest.raises(RuntimeError, match=r"^something else$") as raised:
        ROWS[1].method().backward(model, batch, Hungry(objective, 2, RuntimeError, "something else"))
    assert raised.type is RuntimeError
