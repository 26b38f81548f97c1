"""A step that draws on the host, from any stream, is not recorded: every replay would repeat the draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deltasam.speed.capture._streams import Needs

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "numpy": np.random.rand,
    "numpy, the second of a pair of normal numbers": np.random.randn,
}


def needs() -> Needs:
    made = Needs(torch.device("cpu"))
    made.device = torch.device("cuda")  # treats the CPU as a device with graphs
    return made


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_draws_are_an_obstacle(draw: Callable[[], Any]) -> None:
    np.random.seed(0)  # noqa: NPY002
    np.random.randn()  # noqa: NPY002
    made = needs()
    draw()
    made.finish()
    assert "on the host" in str(made.obstacle)


def test_without_a_draw_there_is_no_obstacle() -> None:
    made = needs()
    made.finish()
    assert made.obstacle is None
