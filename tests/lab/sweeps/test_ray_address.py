"""A Ray cluster that is not there: told at once, where Ray itself tries for a quarter of an hour."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError
from deltasam.lab.sweeps import RayPool


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_nobody_listens_there(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def init(**_: Any) -> None:
        raise AssertionError("Ray was asked")

    ray = ModuleType("ray")
    ray.is_initialized, ray.init = lambda: False, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError, match=rf"the Ray cluster '{address}' cannot be reached: .*; .*ray start --head"):
        next(RayPool(address=address).run([]))
