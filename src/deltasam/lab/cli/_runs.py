"""What the commands about runs share: errors as bad input, configurations from options, tables of results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltasam.lab.cli._errors import CommandError, InputError, StoppedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deltasam.lab.experiments import Result


@contextmanager
def bad_input() -> Iterator[None]:
    """Tells errors in the configuration and the data in one line, exit code 2; 75 if stopped, 1 for the others."""
    from deltasam.integrations import LostError
    from deltasam.integrations.storage import StorageError
    from deltasam.lab.experiments import ConfigError, DivergedError, RunStoppedError
    from deltasam.lab.tasks import DataError

    try:
        yield
    except (ConfigError, DataError) as error:
        raise InputError(str(error)) from error
    except RunStoppedError as error:
        raise StoppedError(str(error)) from error
    except (StorageError, DivergedError, LostError) as error:
        raise CommandError(str(error)) from error


def check_positive(**options: float | None) -> None:
    """Raises an InputError for an option that is not a finite number greater than 0; None is left to its default."""
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0")


def strict(value: Any) -> Any:
    """JSON has no infinities: they become null."""
    if isinstance(value, dict):
        return {key: strict(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def results_table(results: Iterable[Result], extra: Sequence[dict[str, str]] = ()) -> Table:
    """One row per run: method, metrics, cost; ``extra`` holds further columns for each."""
    from rich.table import Table

    listed = list(results)
    more = list(extra) or [{} for _ in listed]
    metrics = [name for name in listed[0].metrics if name != "loss"]
    table = Table("method", *metrics, *more[0], "seconds", "passes", box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for result, others in zip(listed, more, strict=True):
        table.add_row(
            result.method,
            *(f"{result.metrics[name]:.4f}" for name in metrics),
            *others.values(),
            f"{result.train_seconds:.0f}",
            f"{result.forward_passes}/{result.backward_passes}",
        )
    return table


def write_file(path: Path, text: str) -> None:
    """Writes a page or a table in full or not at all: a full disk does not cost the earlier one of that name."""
    from deltasam.integrations.storage import write_bytes

    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode("utf-8", errors="replace")
    try:
        if path.exists() and not path.is_file():  # a pipe such as /dev/stdout, or a folder, which is refused
            path.write_bytes(content)
        else:
            write_bytes(path.resolve(), content)
    except OSError as error:
        error.filename = error.filename or str(path)  # a disk that is full does not say where
        raise


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough where the output goes to a file or a pipe.

    Brackets are brackets, as in the paths and names that it prints, and no markup.
    """
    from rich.console import Console

    console = Console(soft_wrap=True, markup=False)
    return console if console.is_terminal else Console(soft_wrap=True, markup=False, width=200)
