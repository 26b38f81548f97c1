"""Splits of a task: in the local layout, on the hub, or in the user's files; and parts of splits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Split
from deltasam.lab.tasks._files import read_rows
from deltasam.lab.tasks._source import DataSource

_SLICE = re.compile(r"(?P<name>[^\[\]]+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")
_ENDS = {"start": "0", "stop": "100%"}


def whole(split: str) -> str:
    """Returns the split that this one is a part of, or the split itself.

    Example:
        >>> whole("train[:90%]"), whole("train")
        ('train', 'train')
    """
    part = _SLICE.fullmatch(split)
    return split if part is None else part["name"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The source of each split. Parts of a split are written as on the hub: ``train[:90%]``, ``train[90%:]``.

    Attributes:
        dataset: Folder of the dataset in the local layout ``<dataset>/<split>.jsonl.gz``.
        hub: The dataset on the hub, ``path`` or ``path:configuration``.
        files: The user's files by split (CSV, TSV, JSON Lines, Parquet). They override the other sources.
        stand_ins: Other names to try for a split that does not exist, in this order.
    """

    dataset: str = ""
    hub: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    stand_ins: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether the data is the user's own. Datasets of the hub are used as they were published."""
        return bool(self.files) or self.hub is None

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        files = ", ".join(self.files.values())
        return files or self.hub or "your own files: task.files.train=..., and the names of the columns"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of a split, or of a part of one, as they are stored."""
        part = _SLICE.fullmatch(split)
        if part is not None:
            full = self.read(source, part["name"])
            start, stop = (_row(part[end] or default, len(full.rows)) for end, default in _ENDS.items())
            if start >= stop:
                raise DataError(f"{split!r} has no rows: {full.origin} has {len(full.rows)}")
            return Split(full.rows[start:stop], f"{full.origin}[{start}:{stop}]")
        if self.files:
            if split not in self.files:
                raise DataError(
                    f"there is no file for the split {split!r}, only for {', '.join(self.files)}; "
                    f"add one: task.files.{split}=..."
                )
            return Split(read_rows(Path(self.files[split]).expanduser()), self.files[split])
        if not self.dataset and self.hub is None:
            raise DataError(
                f"there is no data: set a file for each split (task.files.{split}=...), a dataset on the hub "
                "(task.hub=path), or a folder inside --data (task.dataset=name)"
            )
        names = (split, *self.stand_ins.get(split, ()))
        return source.split(self.dataset or str(self.hub), names, self.hub)


def _row(text: str, rows: int) -> int:
    return min(rows, round(int(text[:-1]) * rows / 100) if text.endswith("%") else int(text))
