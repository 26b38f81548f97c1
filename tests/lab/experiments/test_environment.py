"""What is recorded about the machine of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deltasam.lab.experiments import environment


def test_the_multiprocessors_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "multiprocessors" not in environment()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=32 + index)
    )
    assert environment()["multiprocessors"] == "33"
