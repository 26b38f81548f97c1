"""A progress bar for a run, and quiet libraries around it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Watch = Callable[[int, int, dict[str, float]], None]


@contextmanager
def bar(title: str) -> Iterator[Watch]:
    """Shows how far a run is; gives the function that :func:`deltasam.lab.experiments.run` calls after every update.

    Where the output is no terminal, a line every tenth of the way takes the bar's place.
    """
    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield _lines(title, console)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task(title, total=None, numbers="")

        def watch(step: int, total: int, latest: dict[str, float]) -> None:
            progress.update(shown, completed=step, total=total, numbers=_numbers(latest))

        yield watch


def _lines(title: str, console: Console) -> Watch:
    def watch(step: int, total: int, latest: dict[str, float]) -> None:
        if step == total or step % max(1, total // 10) == 0:
            console.print(f"{title}  {step}/{total}  {_numbers(latest)}", highlight=False, soft_wrap=True)

    return watch


def _numbers(latest: dict[str, float]) -> str:
    wanted = [name for name in latest if name in ("loss", "sharpness") or name.startswith("eval_")]
    return "  ".join(f"{name.removeprefix('eval_')} {latest[name]:.4g}" for name in wanted if name != "eval_loss")


def quiet() -> None:
    """Silences what the libraries say while loading: the commands report what matters themselves."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for noise in (".*pin_memory.*", ".*mkldnn_matmul.*"):
        warnings.filterwarnings("ignore", message=noise)
