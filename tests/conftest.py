"""What every test gets: fixed seeds, and the real data where it lies beside the repository."""

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

try:  # here: when imported it looks for who refers to what, and does not see what is frozen below
    import hypothesis
except ImportError:  # a machine for the GPU tests only, which need torch, transformers and pytest
    pass
else:
    # The same examples in every run, and no example fails for being slow: a busy machine stalls any of them for
    # seconds. `make fuzz` makes many more of them.
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")

MKLDNN = torch.backends.mkldnn.enabled


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts as in a process of its own, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global stream
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = MKLDNN  # torch turns it off for good where a product in bfloat16 fails
    for setting in ("MIXED_PRECISION", "DYNAMO_BACKEND", "DYNAMO_MODE"):
        os.environ.pop(f"ACCELERATE_{setting}", None)  # set by Trainers of transformers before version 5, for all


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What was imported stays: a garbage collection that looks at all of it takes half a second, and there are many.

    Before every file, since measurements of the package thaw it, and tests import more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the real datasets, models and paper; skips the test where it is absent."""
    folder = find_shared()
    if folder is None:
        pytest.skip("the folder shared/ with the real data is not beside this repository (or set DELTASAM_SHARED)")
    return folder


@pytest.fixture
def libraries_speak_again() -> Iterator[None]:
    """The commands silence the libraries, and that of sweeps minds SIGTERM; other tests want neither."""
    import transformers

    level, stop = transformers.logging.get_verbosity(), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, stop)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def forkserver() -> None:
    """The process that those of a sweep are forks of: it imports for all tests, and is older than their variables."""
    modules = [
        "deltasam.lab.experiments._run",
        "deltasam.lab.experiments._trainer",
        "sklearn.metrics",
    ]  # what a run imports
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def plugins_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plugins may be imported into this process: afterwards nothing knows of them."""
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
    """Older versions of transformers cannot make a causal mask in float64 on every machine; nothing is tested then."""
    try:
        return (yield)
    except RuntimeError as error:
        if str(error) == "value cannot be converted to type float without overflow":
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            if where.endswith("transformers/modeling_attn_mask_utils.py"):
                pytest.skip("this version of transformers makes no causal masks in float64")
        raise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` say why they are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
