"""Tasks whose splits are tables: in the local layout, on the hub, or in files the user names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deltasam.tasks._errors import DataError
from deltasam.tasks._files import read_rows
from deltasam.tasks._source import DataSource, Split


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the table of each split is.

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

    def read(self, source: DataSource, split: str) -> Split:
        """The rows of a split as they are stored."""
        if self.files:
            if split not in self.files:
                raise DataError(
                    f"there is no file for the split {split!r}, only for {', '.join(self.files)}; "
                    f"name it: task.files.{split}=..."
                )
            return Split(read_rows(Path(self.files[split]).expanduser()), self.files[split])
        if not self.dataset and self.hub is None:
            raise DataError(
                f"there is no data: name your files (task.files.train=train.csv task.files.{split}=...), a dataset on "
                "the hub (task.hub=path), or a folder of --data (task.dataset=name)"
            )
        names = (split, *self.stand_ins.get(split, ()))
        return source.split(self.dataset or str(self.hub), names, self.hub)
