"""Fixtures and hooks for all tests: fixed seeds, and the real data if it is available."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import random
import signal
import sys
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.data import find_shared

try:  # here, because on import it inspects the garbage collector's objects, which are frozen below
    import hypothesis
except ImportError:  # a machine for GPU tests, which need only torch, transformers and pytest
    pass
else:
    # The same examples in every run. No example fails for being slow, because a busy machine may stall any of them.
    # `make fuzz` generates many more.
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")

MKLDNN = torch.backends.mkldnn.enabled
IMPORTED = {"modules": 0}  # when objects were last frozen


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Resets global state, so that a test does not depend on those before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global stream
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = MKLDNN  # torch disables it for good when a bfloat16 product fails
    for setting in ("MIXED_PRECISION", "DYNAMO_BACKEND", "DYNAMO_MODE"):
        os.environ.pop(f"ACCELERATE_{setting}", None)  # set by the Trainer before transformers 5


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Excludes imported objects from garbage collection: scanning them takes half a second each time.

    Repeated when the tests before have imported much more.
    """
    if len(sys.modules) > IMPORTED["modules"] + 50:
        IMPORTED["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Returns the folder with the real datasets, models and paper; skips the test if it is absent."""
    folder = find_shared()
    if folder is None:
        pytest.skip("no folder shared/ with the real data next to this repository (or set DELTASAM_SHARED)")
    return folder


@pytest.fixture
def libraries_speak_again() -> Iterator[None]:
    """Undoes what the commands change: the logging of libraries, and the handler of SIGTERM."""
    import transformers

    level, stop = transformers.logging.get_verbosity(), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, stop)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def forkserver() -> None:
    """Starts the server that forks the processes of sweeps: it imports once, and before tests set variables."""
    modules = ["deltasam.lab.experiments._run", "deltasam.lab.experiments._trainer", "sklearn.metrics"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def plugins_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes plugins that the test imports into this process."""
    from deltasam.lab import plugins
    from deltasam.lab.catalogue import METHODS
    from deltasam.lab.experiments import REGULARISERS, WEIGHTINGS
    from deltasam.lab.tasks import TASKS

    tables: list[dict[str, Any]] = [METHODS, WEIGHTINGS, REGULARISERS, TASKS]
    before, modules = [dict(table) for table in tables], set(sys.modules)
    monkeypatch.setattr(plugins, "_imported", [])
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - modules:
        if "plugin" in name:
            del sys.modules[name]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips tests in which an older transformers cannot make a causal mask in float64 on this machine."""
    try:
        return (yield)
    except RuntimeError as error:
        if str(error) == "value cannot be converted to type float without overflow":
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            if where.endswith("transformers/modeling_attn_mask_utils.py"):
                pytest.skip("this version of transformers makes no causal masks in float64")
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` if there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
