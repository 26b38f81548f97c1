"""Numbers that a model puts on the device while a step is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltasam.speed.capture._graph import filled_constants


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
    with filled_constants():
        same = torch.tensor(data, **options)
        number = torch.tensor(data, **{**options, "device": "cuda"}) if not isinstance(data, list) else same
    for found in (same, number):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
    assert len(filled) == (not isinstance(data, list))


def test_torch_is_restored_afterwards() -> None:
    own = torch.tensor
    with pytest.raises(KeyError), filled_constants():
        raise KeyError
    assert torch.tensor is own
