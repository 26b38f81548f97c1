"""The summary of a sweep."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from deltasam.lab.cli._sweep_view import SweepView, summary
from deltasam.lab.sweeps import Event


def outcome(values: dict[tuple[tuple[str, Any], ...], list[float]], *, higher: bool = True) -> Any:
    results = [
        (
            SimpleNamespace(setup="mrpc/bert", method="sam", point=point),
            SimpleNamespace(primary_value=value, primary_metric="score", higher_is_better=higher),
        )
        for point, found in values.items()
        for value in found
    ]
    return SimpleNamespace(results=results, failed={}, trained=0)


def test_points_of_a_grid_without_tuning_are_separate_rows() -> None:
    printed = io.StringIO()
    points = {(("method.rho", 0.01),): [0.8, 0.9], (("method.rho", 0.5),): [0.3, 0.3]}
    summary(outcome(points), Console(file=printed, width=200))
    lines = [line.split() for line in printed.getvalue().splitlines() if "mrpc/bert" in line]
    assert [(line[3], line[4], line[-1]) for line in lines] == [
        ("2", "0.8500", "rho=0.01"),
        ("2", "0.3000", "rho=0.5"),
    ]


def test_the_best_error_is_the_smallest() -> None:
    for higher, best in ((True, "0.9000"), (False, "0.8000")):
        printed = io.StringIO()
        summary(outcome({(): [0.8, 0.9]}, higher=higher), Console(file=printed, width=200))
        (line,) = (line.split() for line in printed.getvalue().splitlines() if "mrpc/bert" in line)
        assert line[-1] == best


def test_a_value_that_is_not_finite_is_shown_and_is_not_the_best() -> None:
    for higher in (True, False):
        printed = io.StringIO()
        summary(outcome({(): [math.nan, 0.8]}, higher=higher), Console(file=printed, width=200))
        (line,) = (line.split() for line in printed.getvalue().splitlines() if "mrpc/bert" in line)
        assert line[-3:] == ["nan", "nan", "0.8000"]


def test_the_line_of_a_run_has_its_note() -> None:
    printed = io.StringIO()
    view = SweepView(Console(file=printed, width=200))
    for name, note in (("one", ""), ("two", "not captured")):
        view.watch(Event(kind="finished", run=name, attempt=1, metric="accuracy", value=0.5, note=note))
    assert printed.getvalue().splitlines() == [
        "[1/1] one finished: accuracy 0.5000",
        "[2/2] two finished: accuracy 0.5000 (not captured)",
    ]
