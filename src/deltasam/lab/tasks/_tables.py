"""Tasks whose splits are tables: in the local layout, on the hub, or in files the user names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from deltasam.lab.tasks._errors import DataError
from deltasam.lab.tasks._files import read_rows
from deltasam.lab.tasks._source import DataSource, Split

_SLICE = re.compile(r"(?P<name>[^\[\]]+)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]")


def is_part(split: str) -> bool:
    """Whether a split is named as a part of another.

    Example:
        >>> is_part("train[:90%]"), is_part("train")
        (True, False)
    """
    return _SLICE.fullmatch(split) is not None


def whole(split: str) -> str:
    """The split that this one is a part of, or itself.

    Example:
        >>> whole("train[:90%]"), whole("train")
        ('train', 'train')
    """
    part = _SLICE.fullmatch(split)
    return split if part is None else part["name"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the table of each split is. A part of one is named as on the hub: ``train[:90%]``, ``train[90%:]``.

    Attributes:
        dataset: Folder of the dataset in the local layout ``<dataset>/<split>.jsonl.gz``.
        hub: The dataset on the hub, ``path`` or ``path:configuration``.
        files: The user's own files by split (CSV, TSV, JSON Lines, Parquet); they go before the others.
        stand_ins: Names to look for where a split of that name is not there, in the order of trying.
    """

    dataset: str = ""
    hub: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    stand_ins: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether the data is the user's own, and not a dataset of the hub, which is taken as it was published."""
        return bool(self.files) or self.hub is None

    def read(self, source: DataSource, split: str) -> Split:
        """The rows of a split, or of a part of one, as they are stored."""
        part = _SLICE.fullmatch(split)
        if part is not None:
            whole = self.read(source, part["name"])
            start, stop = _bounds(part, len(whole.rows))
            if start >= stop:
                raise DataError(f"{split!r} has no rows: {whole.origin} has {len(whole.rows)}")
            return Split(whole.rows[start:stop], f"{whole.origin}[{start}:{stop}]")
        if self.files:
            if split not in self.files:
                raise DataError(
                    f"there is no file for the split {split!r}, only for {', '.join(self.files)}; "
                    f"name it: task.files.{split}=..."
                )
            return Split(read_rows(Path(self.files[split]).expanduser()), self.files[split])
        if not self.dataset and self.hub is None:
            raise DataError(
                f"there is no data: name your files, one for each split (task.files.{split}=...), a dataset on the "
                "hub (task.hub=path), or a folder of --data (task.dataset=name)"
            )
        names = (split, *self.stand_ins.get(split, ()))
        return source.split(self.dataset or str(self.hub), names, self.hub)


def _bounds(part: re.Match[str], rows: int) -> tuple[int, int]:
    """Number of the first row, and of the first that is no longer in it."""

    def place(text: str | None, default: int) -> int:
        if text is None:
            return default
        return min(rows, round(int(text[:-1]) * rows / 100) if text.endswith("%") else int(text))

    return place(part["start"], 0), place(part["stop"], rows)
