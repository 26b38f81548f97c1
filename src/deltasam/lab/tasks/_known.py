"""The tasks by name: a dictionary that ``_registry.py`` fills, so that tasks can name each other."""

from __future__ import annotations

from deltasam.lab.plugins import load_plugins
from deltasam.lab.tasks._base import Task
from deltasam.step.names import look_up, suggest

TASKS: dict[str, Task] = {}


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
