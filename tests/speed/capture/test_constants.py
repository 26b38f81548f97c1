"""Numbers and tensors that a model puts on the device while a step is recorded."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from deltasam.speed.capture._constants import HostConstants, filled_numbers


@pytest.mark.parametrize("data", [0.0, -1.5, 3, True, float("-inf"), [1.0, 2.0]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float64}, {"device": "cpu"}, {"requires_grad": True}], ids=str
)
def test_they_equal_those_of_torch(data: Any, options: dict[str, Any], monkeypatch: Any) -> None:
    if options.get("requires_grad") and not isinstance(data, (float, list)):
        pytest.skip("only floating-point tensors have a gradient")
    wanted = torch.tensor(data, **options)
    full, filled = torch.full, []

    def on_the_host(size: Any, value: Any, *, device: Any, **rest: Any) -> Any:
        filled.append(value)
        return full(size, value, **rest)

    monkeypatch.setattr(torch, "full", on_the_host)
    with filled_numbers():
        same = torch.tensor(data, **options)
        number = torch.tensor(data, **{**options, "device": "cuda"}) if not isinstance(data, list) else same
    for found in (same, number):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
    assert len(filled) == (not isinstance(data, list))


def test_torch_is_restored_afterwards() -> None:
    own = torch.tensor
    with pytest.raises(KeyError), filled_numbers():
        raise KeyError
    assert torch.tensor is own


def on_the_device(host: torch.Tensor) -> Any:
    """A copy on a device that every machine has, where it is no use; the tests look at the calls."""
    return host.to("meta")


def constants(model: nn.Module | None = None, inputs: Any = None) -> HostConstants:
    return HostConstants(nn.Linear(2, 2, device="meta") if model is None else model, inputs)


MOVES = {
    "device": lambda x: x.to("meta"),
    "keyword": lambda x: x.to(device=torch.device("meta"), dtype=torch.float64),
    "like-a-tensor": lambda x: x.to(torch.empty(3, device="meta", dtype=torch.float16)),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What torch itself has copied so far."""
    own, found = torch.Tensor.to, []

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.append(tensor)
        return own(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", counted, raising=False)
    return found


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_a_tensor_is_copied_once(move: Any, copies: list[torch.Tensor]) -> None:
    found = constants()
    with found.kept():
        first = move(torch.arange(4))
    with found.read():
        again = move(torch.arange(4))
    assert len(copies) == 1
    assert again is not first
    assert (again.dtype, again.shape, again.device) == (first.dtype, first.shape, first.device)


@pytest.mark.parametrize(
    "other", [torch.arange(4) + 1, torch.arange(5), torch.arange(4.0), torch.arange(4).expand(1, 4)], ids=str
)
def test_other_values_are_copied_as_usual(other: torch.Tensor, copies: list[torch.Tensor]) -> None:
    found = constants()
    with found.kept():
        on_the_device(torch.arange(4))
    with found.read():
        on_the_device(other)
    assert copies[-1] is other


def test_tensors_are_read_in_the_order_of_the_step(copies: list[torch.Tensor]) -> None:
    found = constants()
    with found.kept():
        for length in (2, 3, 4):
            on_the_device(torch.arange(length))
    with found.read():  # the recorded step has no copy of length 3
        assert [on_the_device(torch.arange(length)).numel() for length in (2, 4)] == [2, 4]
        assert len(copies) == 3
        on_the_device(torch.arange(3))
    assert len(copies) == 4, "it comes too late"


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Linear(1, 1), None),
        (nn.BatchNorm1d(2, affine=False), None),
        (None, {"labels": torch.zeros(2)}),
        (torch.compile(nn.Linear(1, 1, device="meta")), None),
        (nn.Sequential(torch.compile(nn.Linear(1, 1, device="meta"))), None),
    ],
    ids=["parameters on the host", "buffers on the host", "batch on the host", "compiled", "a part is compiled"],
)
def test_there_are_no_constants(model: Any, inputs: Any) -> None:
    with (found := constants(model, inputs)).kept():
        assert "to" not in vars(torch.Tensor)
    with found.read():
        assert "to" not in vars(torch.Tensor)


def test_tensors_that_stay_on_the_host_are_left_alone() -> None:
    found = constants()
    with found.kept():
        torch.arange(3).to(torch.float64)
        torch.arange(3).to("cpu")
    assert not found._found


def test_the_methods_of_torch_are_restored() -> None:
    with pytest.raises(KeyError), constants().kept():
        raise KeyError
    assert not {"to", "cuda"} & vars(torch.Tensor).keys()


def test_two_threads_wait_for_each_other() -> None:
    left, errors = threading.Event(), []

    def other() -> None:
        try:
            with constants().kept():
                left.wait(10)
        except AttributeError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    with constants().kept():
        thread.start()
        thread.join(0.1)
    left.set()
    thread.join()
    assert not errors
    assert not {"to", "cuda"} & vars(torch.Tensor).keys()
