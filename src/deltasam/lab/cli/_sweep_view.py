"""Progress and summary of a sweep: one row per setup and method on a terminal, one line per event elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deltasam.lab.experiments import Result
    from deltasam.lab.sweeps import Event, Outcome, Planned


class SweepView:
    """Shows the progress of a sweep. Use it as a context manager around the sweep."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cell: dict[str, tuple[str, str]] = {}
        self._state: dict[str, str] = {}
        self._progress: dict[str, str] = {}
        self._values: dict[str, float] = {}
        self._live: Any = None

    def __enter__(self) -> SweepView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self.table, console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def announce(self, runs: Sequence[Planned], known: dict[str, float]) -> None:
        """Adds the runs of a stage; ``known`` has the values of the finished ones."""
        from deltasam.step.names import pluralized

        stage = "with the chosen points: " if self._cell else ""
        for planned in runs:
            name = planned.config.run_name
            self._cell[name] = (planned.setup, planned.method)
            if name in known:
                self._state[name], self._values[name] = "done", known[name]
            else:
                self._state.setdefault(name, "waiting")
        done = sum(planned.config.run_name in known for planned in runs)
        if self._live is None:
            self._console.print(f"{stage}{pluralized(len(runs), 'run')}, {done} already finished", highlight=False)

    def watch(self, event: Event) -> None:
        """Takes one event of the sweep."""
        self._progress.pop(event.run, None)
        self._state[event.run] = {"finished": "done", "found": "done", "failed": "failed"}.get(event.kind, "running")
        if event.value is not None:
            self._values[event.run] = event.value
        if event.kind == "step":
            self._progress[event.run] = f"{event.step}/{event.total}"
        elif event.kind == "retried":
            self._state[event.run] = "waiting"
        if self._live is None and event.kind not in ("step", "started"):
            outcome = event.error or f"{event.metric} {event.value:.4f}" + (f" ({event.note})" if event.note else "")
            done = sum(state == "done" for state in self._state.values())
            line = f"[{done}/{len(self._state)}] {event.run} {event.kind}: {outcome}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def table(self) -> Table:
        """Returns the current state as a table."""
        from rich.table import Table
        from rich.text import Text

        table = Table("setup", "method", "done", "failed", "mean so far", "running", box=None, header_style="bold")
        for cell in dict.fromkeys(self._cell.values()):
            names = [name for name, at in self._cell.items() if at == cell]
            states = [self._state[name] for name in names]
            values = [self._values[name] for name in names if name in self._values]
            running = [self._progress.get(n, "…") for n in names if self._state[n] == "running"]
            failed = states.count("failed")
            table.add_row(
                *cell, f"{states.count('done')}/{len(names)}", Text(str(failed), style="red") if failed else "",
                f"{fmean(values):.4f}" if values else "", " ".join(running),
            )  # fmt: skip
        return table


def summary(outcome: Outcome, console: Console) -> None:
    """Prints the results of the sweep."""
    from rich.table import Table

    from deltasam.lab.experiments import rank
    from deltasam.step.names import pluralized

    cells: dict[tuple[str, str, str], list[Result]] = {}
    for planned, result in outcome.results:
        # The chosen point of the grid, or each point if the sweep does not tune.
        point = " ".join(f"{setting.rpartition('.')[2]}={value}" for setting, value in planned.point)
        cells.setdefault((planned.setup, planned.method, point), []).append(result)
    table = Table(
        "setup", "method", "metric", "runs", "mean", "std", "best", "settings", box=None, header_style="bold"
    )
    for (setup, method, point), results in cells.items():
        values = [result.primary_value for result in results]
        best = max(values, key=partial(rank, higher_is_better=results[0].higher_is_better))
        finite = all(map(math.isfinite, values))  # stdev fails for others before Python 3.13
        spread = stdev(values) if len(values) > 1 and finite else math.nan
        table.add_row(
            setup, method, results[0].primary_metric, str(len(values)), f"{fmean(values):.4f}",
            f"{spread:.4f}" if len(values) > 1 else "", f"{best:.4f}", point,
        )  # fmt: skip
    console.print(table)
    finished, trained = pluralized(len(outcome.results), "result"), pluralized(outcome.trained, "run")
    console.print(f"\n{finished}, {trained} trained now, {len(outcome.failed)} failed", highlight=False)
    for name, error in outcome.failed.items():
        console.print(f"failed: {name}: {error}", highlight=False, style="red")
