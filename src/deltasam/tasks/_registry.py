"""The tasks by name."""

from __future__ import annotations

import difflib

from deltasam.tasks._base import Task
from deltasam.tasks._docstrings import DocstringTask
from deltasam.tasks._glue import GLUE
from deltasam.tasks._sentences import SentenceTask

#: Every task of the package; the last ones are for data of the user's own, whose files and columns are to be named.
TASKS: dict[str, Task] = {
    "docstrings": DocstringTask(name="docstrings"),
    **GLUE,
    "classification": SentenceTask(name="classification"),
    "regression": SentenceTask(name="regression", kind="regression"),
}


def find_task(name: str) -> Task:
    """The task of this name.

    Raises:
        ValueError: There is none; the message names the nearest one.

    Example:
        >>> find_task("mrpc").primary
        'accuracy'
    """
    if name in TASKS:
        return TASKS[name]
    plain = name.lower().replace("-", "").replace("_", "")
    spelled = {known.replace("_", ""): known for known in TASKS}
    if plain in spelled:
        return TASKS[spelled[plain]]
    close = difflib.get_close_matches(plain, spelled, n=1, cutoff=0.5)
    hint = f"did you mean {spelled[close[0]]}?" if close else f"there are {', '.join(TASKS)}"
    raise ValueError(f"{name!r} is not a task; {hint}")
