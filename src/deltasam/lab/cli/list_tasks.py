"""``deltasam list tasks``: what there is to learn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ListTasks:
    """The tasks with their metrics, the primary one first, and where their data come from."""

    def run(self) -> None:
        """Prints one row per task."""
        from rich.table import Table

        from deltasam.lab.cli._runs import wide_console
        from deltasam.lab.plugins import load_plugins
        from deltasam.lab.tasks import TASKS, DocstringTask, MirrorTask

        load_plugins()
        table = Table("task", "metrics", "data", box=None, pad_edge=False, header_style="bold")
        for name, task in TASKS.items():
            hub = getattr(task, "hub", None)
            if isinstance(task, DocstringTask):
                data = "Python's standard library, no download"
            elif isinstance(task, MirrorTask):
                data = "sentences of STS-B; STS12-16, STS-B, SICK-R"
            elif not hasattr(task, "files"):
                data = "in a module of your own"
            elif task.files:
                data = ", ".join(task.files.values())
            else:
                data = hub or "your own files: task.files.train=..., and the names of the columns"
            shown = task.metrics if len(task.metrics) < 4 else (task.metrics[0], "...")
            table.add_row(name, ", ".join(shown), data)
        wide_console().print(table)
