"""The source of the datasets: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Split
from deltasam.lab.tasks._files import ENDINGS, read_rows

VARIABLE = "DELTASAM_DATA"


@dataclass(frozen=True)
class DataSource:
    """A folder with ``<dataset>/<split>.jsonl.gz`` (or .jsonl, .parquet, .csv, .tsv), or the hub.

    A file whose name continues after the split, such as ``train_subset9k.jsonl.gz``, is used if there is no file for
    the whole split. The run records its name.

    Attributes:
        folder: The folder, or None for the hub.

    Example:
        >>> DataSource.find(None, environment={})
        DataSource(folder=None)
        >>> DataSource.find(None, environment={"DELTASAM_DATA": "."}).folder == Path(".").resolve()
        True
    """

    folder: Path | None = None

    @classmethod
    def find(cls, folder: str | Path | None, environment: dict[str, str] | None = None) -> DataSource:
        """Returns the given folder, or that of the environment variable ``DELTASAM_DATA``, or the hub.

        Raises:
            DataError: The folder does not exist.
        """
        named = folder or (os.environ if environment is None else environment).get(VARIABLE)
        if not named:
            return cls()
        path = Path(named).expanduser().resolve()
        if not path.is_dir():
            option = "--data" if folder else VARIABLE
            raise DataError(
                f"{option}: the folder {path} does not exist; it should contain <dataset>/<split>.jsonl.gz"
            )
        return cls(path)

    def split(self, dataset: str, names: Sequence[str], hub: str | None) -> Split:
        """Returns the rows of a split.

        Args:
            dataset: Folder of the dataset in the local layout.
            names: Possible names of the split, the best first.
            hub: The dataset on the hub, ``path`` or ``path:configuration``, or None.

        Raises:
            DataError: The split does not exist. The message lists what is there.
        """
        if self.folder is not None:
            return self._local(dataset, names)
        if hub is None:
            raise DataError(
                f"{dataset}: this dataset is not on the hub; set --data or {VARIABLE} to a folder with "
                f"{dataset}/{names[0]}.jsonl.gz"
            )
        return _from_hub(hub, names, dataset)

    def _local(self, dataset: str, names: Sequence[str]) -> Split:
        assert self.folder is not None
        folder = self.folder / dataset
        if not folder.is_dir():
            present = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
            raise DataError(f"{dataset}: there is no folder {folder}; {self.folder} has {_listed(present)}")
        files = [path for path in sorted(folder.iterdir()) if path.name.endswith(ENDINGS)]
        for name in names:
            found = _file_of_split(files, name, f"{dataset}: {folder}")
            if found is not None:
                return Split(read_rows(found), str(found.relative_to(self.folder)))
        raise DataError(
            f"{dataset}: there is no split {names[0]!r} in {folder}; it has {_listed([path.name for path in files])}"
        )


def _file_of_split(files: Sequence[Path], name: str, where: str) -> Path | None:
    """Returns the file of a split, or of a subset of it. A copy such as ``train.backup.jsonl`` is neither."""
    whole = [path for ending in ENDINGS for path in files if path.name == name + ending]
    if len(whole) > 1:
        raise DataError(
            f"{where}: the split {name!r} is in several files, {_listed([path.name for path in whole])}; keep only one"
        )
    subsets = [path for path in files if path.name.startswith(f"{name}_")]
    if not whole and len(subsets) > 1:
        raise DataError(
            f"{where} has no {name}{ENDINGS[0]} but several subsets of it, "
            f"{_listed([path.name for path in subsets])}; choose one with task.train_split or task.eval_split"
        )
    return next(iter(whole + subsets), None)


def _from_hub(hub: str, names: Sequence[str], dataset: str) -> Split:
    path, _, configuration = hub.partition(":")
    try:
        import datasets

        loaded = None if datasets.config.HF_HUB_OFFLINE else datasets.load_dataset(path, configuration or None)
    except Exception as error:  # the client of the hub raises many kinds of errors
        raise DataError(
            f"{dataset}: {hub} could not be loaded from the hub ({type(error).__name__}: {error}); set --data or "
            f"{VARIABLE} to a local folder"
        ) from error
    if loaded is None:
        raise DataError(
            f"{dataset}: the hub is switched off (HF_HUB_OFFLINE); set --data or {VARIABLE} to a folder with "
            f"{dataset}/{names[0]}.jsonl.gz, or use a task without download: --task docstrings"
        )
    for name in names:
        if name in loaded:
            return Split(loaded[name].to_list(), f"hub:{hub}/{name}")
    raise DataError(
        f"{dataset}: there is no split {names[0]!r} in {hub} on the hub, which has {_listed(list(loaded))}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
