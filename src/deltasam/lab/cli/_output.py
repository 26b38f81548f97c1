"""What the commands print and write: tables, progress bars, JSON, files."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltasam.lab.cli._conditions import AS_TRAINED, by_condition

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deltasam.lab.experiments import Result

_DETAILS = ("loss", "brier", "ece_low", "ece_high", "temperature")  # `deltasam evaluate` shows them

Watch = Callable[[int, int, dict[str, float]], None]


def wide_console() -> Console:
    """Returns a console as wide as the terminal, or 200 columns where the output is a file or a pipe.

    It takes brackets literally, not as markup: paths and names may contain them.
    """
    from rich.console import Console

    console = Console(soft_wrap=True, markup=False)
    return console if console.is_terminal else Console(soft_wrap=True, markup=False, width=200)


def plain_table(*columns: str) -> Table:
    """Returns an empty table without lines."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def results_table(results: Iterable[Result], extra: Sequence[dict[str, str]] = ()) -> Table:
    """Returns a table with one row per run: method, metrics as trained, cost. ``extra`` holds further columns."""
    listed = list(results)
    more = list(extra) or [{} for _ in listed]
    metrics = [name for name in by_condition(listed[0].metrics)[AS_TRAINED] if name not in _DETAILS]
    table = plain_table("method", *metrics, *more[0], "seconds", "passes")
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


def print_note(text: str) -> None:
    """Prints a note about a choice to stderr, once for the processes of ``torchrun``."""
    if not int(os.environ.get("RANK", "0")):
        print(text, file=sys.stderr)


def warn_if_not_learned(folders: Sequence[Path], console: Console) -> None:
    """Prints a warning about finished runs that seem to have learned nothing, with what to try."""
    from deltasam.lab.report import learning_problems, read_runs

    for problem in learning_problems(read_runs(*folders).finished):
        console.print(f"Warning: {problem}", style="yellow", highlight=False)


def without_nan(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_file(path: Path, text: str) -> None:
    """Writes a page or a table completely or not at all: a full disk does not destroy an earlier version."""
    from deltasam.integrations.storage import write_bytes

    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode("utf-8", errors="replace")
    try:
        if path.exists() and not path.is_file():  # a pipe such as /dev/stdout, or a folder, which raises
            path.write_bytes(content)
        else:
            write_bytes(path.resolve(), content)
    except OSError as error:
        error.filename = error.filename or str(path)  # missing for a full disk
        raise


@contextmanager
def progress_bar(title: str) -> Iterator[Watch]:
    """Shows the progress of a run; yields the ``watch`` function for :func:`deltasam.lab.experiments.run`.

    Where the output is not a terminal, it prints a line after every tenth of the updates instead. A run whose first
    update is not number 1 was resumed, which it says.
    """
    from rich import progress as rp
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    columns = (
        rp.TextColumn("{task.description}", markup=False), rp.BarColumn(), rp.MofNCompleteColumn(),
        rp.TextColumn("{task.fields[numbers]}"), rp.TimeElapsedColumn(), rp.TimeRemainingColumn(),
    )  # fmt: skip
    started = False

    with rp.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shown = progress.add_task(title, total=None, numbers="")

        def watch(step: int, total: int, latest: dict[str, float]) -> None:
            nonlocal started
            if not started and step > 1:
                line = f"{title.strip()}: resumed from update {step - 1} of {total}"
                console.print(line, highlight=False, soft_wrap=True)
            started = True
            progress.update(shown, completed=step, total=total, numbers=_numbers(latest))
            if not console.is_terminal and (step == total or step % max(1, total // 10) == 0):
                console.print(f"{title}  {step}/{total}  {_numbers(latest)}", highlight=False, soft_wrap=True)

        yield watch


def _numbers(latest: dict[str, float]) -> str:
    wanted = [name for name in latest if name in ("loss", "sharpness") or name.startswith("eval_")]
    return "  ".join(f"{name.removeprefix('eval_')} {latest[name]:.4g}" for name in wanted if name != "eval_loss")


def silence_libraries() -> None:
    """Turns off log messages, progress bars and harmless warnings of other libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for message in (".*pin_memory.*", ".*mkldnn_matmul.*"):
        warnings.filterwarnings("ignore", message=message)
