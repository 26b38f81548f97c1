"""The tasks by name."""

from __future__ import annotations

from deltasam.lab.plugins import load_plugins
from deltasam.lab.tasks._base import Task
from deltasam.lab.tasks._docstrings import DocstringTask
from deltasam.lab.tasks._glue import GLUE
from deltasam.lab.tasks._mirror import MirrorTask
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._summarization import CNN_DAILYMAIL, Seq2SeqTask
from deltasam.step.names import look_up, suggest

#: All tasks by name. The last three are for the user's data: set their files and columns.
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
    """Returns the task of this name.

    Raises:
        ValueError: There is no such task. The message names the most similar one.
        PluginError: A plugin cannot be imported.

    Example:
        >>> find_task("mrpc").primary
        'accuracy'
    """
    load_plugins()
    found = look_up(TASKS, name)
    if found is None:
        raise ValueError(f"{name!r} is not a task; {suggest(name, TASKS)}")
    return found
