"""The tasks by name."""

from __future__ import annotations

import difflib

from deltasam.plugins import load_plugins
from deltasam.tasks._base import Task
from deltasam.tasks._docstrings import DocstringTask
from deltasam.tasks._glue import GLUE
from deltasam.tasks._mirror import MirrorTask
from deltasam.tasks._sentences import SentenceTask
from deltasam.tasks._summarization import CNN_DAILYMAIL, Seq2SeqTask

#: Every task of the package; the last ones are for data of the user's own, whose files and columns are to be named.
TASKS: dict[str, Task] = {
    "docstrings": DocstringTask(name="docstrings"),
    **GLUE,
    "mirror": MirrorTask(name="mirror"),
    "cnn_dailymail": CNN_DAILYMAIL,
    "classification": SentenceTask(name="classification"),
    "regression": SentenceTask(name="regression", kind="regression"),
    "seq2seq": Seq2SeqTask(name="seq2seq"),
}


def find_task(name: str) -> Task:
    """The task of this name.

    Raises:
        ValueError: There is none; the message names the nearest one.
        PluginError: A module of the user's own cannot be imported.

    Example:
        >>> find_task("mrpc").primary
        'accuracy'
    """
    load_plugins()
    if name in TASKS:
        return TASKS[name]
    plain = name.lower().replace("-", "").replace("_", "")
    spelled = {known.replace("_", ""): known for known in TASKS}
    if plain in spelled:
        return TASKS[spelled[plain]]
    close = difflib.get_close_matches(plain, spelled, n=1, cutoff=0.5)
    hint = f"did you mean {spelled[close[0]]}?" if close else f"there are {', '.join(TASKS)}"
    raise ValueError(f"{name!r} is not a task; {hint}")
