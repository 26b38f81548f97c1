"""A task for language models without download: which package does this description of a function come from?"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Row, Split
from deltasam.lab.tasks._docstrings import harvest, split_of
from deltasam.lab.tasks._prompts import PromptTask
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._tables import whole

_SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class PackagePromptTask(PromptTask):
    """First sentences of docstrings from six packages of Python's standard library; the answer is the package.

    A small language model learns it from a few hundred rows. A hash of the function's name decides the split, so that
    the task is the same everywhere for one version of Python.

    Example:
        >>> task = PackagePromptTask(name="packages-prompt", general_rows=0)
        >>> rows = task.load(DataSource()).splits["validation"]
        >>> sorted(rows[0]), {row["label"] for row in rows} == set(range(6))
        (['label', 'text'], True)
    """

    classes: tuple[str, ...] = ("asyncio", "email", "logging", "importlib", "xml", "multiprocessing")
    words: tuple[str, ...] = ("async", "email", "logging", "import", "XML", "process")
    max_length: int = 64
    template: str = "{text}\nTopic:"

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return "Python's standard library, no download"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of ``train`` (80%) or ``validation`` (20%), or of a part."""
        if whole(split) != split:
            return super().read(source, split)
        if split not in _SPLITS:
            raise DataError(f"{self.name}: there is no split {split!r}, only {', '.join(_SPLITS)}")
        rows = [dict(row) for place, row in _descriptions(self.classes) if place == split]
        return Split(rows, f"docstrings of the standard library, {split}")


@lru_cache(maxsize=4)
def _descriptions(packages: tuple[str, ...]) -> tuple[tuple[str, Row], ...]:
    """Returns split and row of every description, without those that occur in more than one package."""
    found: dict[str, list[tuple[str, str]]] = {}
    for module, name, description in harvest(Path(sysconfig.get_paths()["stdlib"]), packages):
        found.setdefault(description, []).append((module.partition(".")[0], name))
    rows = [
        (split_of(places[0][1]), {"text": description, "label": packages.index(places[0][0])})
        for description, places in found.items()
        if len({package for package, _ in places}) == 1
    ]
    if not rows:
        raise DataError("packages-prompt: the sources of the standard library are not installed with this Python")
    return tuple(rows)
