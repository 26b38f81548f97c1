"""Where the data comes from: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltasam.lab.tasks._errors import DataError
from deltasam.lab.tasks._files import ENDINGS, Row, read_rows

VARIABLE = "DELTASAM_DATA"


@dataclass(frozen=True)
class Split:
    """The rows of a split and where they were found."""

    rows: list[Row]
    origin: str


@dataclass(frozen=True)
class DataSource:
    """A folder with ``<dataset>/<split>.jsonl.gz`` (or .jsonl, .parquet, .csv, .tsv), or the hub where there is none.

    A split may also lie in a file whose name goes on after the split, such as ``train_subset9k.jsonl.gz``: then the
    origin that is recorded with the run says so.

    Attributes:
        folder: The folder; None for the hub.

    Example:
        >>> DataSource.find(None, environment={})
        DataSource(folder=None)
        >>> DataSource.find(None, environment={"DELTASAM_DATA": "."}).folder == Path(".").resolve()
        True
    """

    folder: Path | None = None

    @classmethod
    def find(cls, folder: str | Path | None, environment: dict[str, str] | None = None) -> DataSource:
        """The folder that is named, else the one the environment variable ``DELTASAM_DATA`` names, else the hub.

        Raises:
            DataError: The folder does not exist.
        """
        named = folder or (os.environ if environment is None else environment).get(VARIABLE)
        if not named:
            return cls()
        path = Path(named).expanduser().resolve()
        if not path.is_dir():
            asked = "--data" if folder else VARIABLE
            raise DataError(f"{asked}: the folder {path} does not exist; it should hold <dataset>/<split>.jsonl.gz")
        return cls(path)

    def split(self, dataset: str, names: Sequence[str], hub: str | None) -> Split:
        """The rows of a split.

        Args:
            dataset: Folder of the dataset in the local layout.
            names: Names the split goes by, the best first.
            hub: The dataset on the hub, ``path`` or ``path:configuration``; None if it is not there.

        Raises:
            DataError: It is not to be found; the message says where it was looked for and what is there.
        """
        if self.folder is not None:
            return self._local(dataset, names)
        if hub is None:
            raise DataError(
                f"{dataset}: this dataset is not on the hub; give a folder with {dataset}/{names[0]}.jsonl.gz by "
                f"--data or {VARIABLE}"
            )
        return _from_hub(hub, names, dataset)

    def _local(self, dataset: str, names: Sequence[str]) -> Split:
        assert self.folder is not None
        folder = self.folder / dataset
        if not folder.is_dir():
            there = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
            raise DataError(f"{dataset}: there is no folder {folder}; {self.folder} has {_listed(there)}")
        files = [path for path in sorted(folder.iterdir()) if path.name.endswith(ENDINGS)]
        for name in names:
            found = _the_one(files, name, f"{dataset}: {folder}")
            if found is not None:
                return Split(read_rows(found), str(found.relative_to(self.folder)))
        raise DataError(
            f"{dataset}: there is no split {names[0]!r} in {folder}; it has {_listed([path.name for path in files])}"
        )


def _the_one(files: Sequence[Path], name: str, where: str) -> Path | None:
    """The file of a split, else that of a subset of it; a copy such as ``train.backup.jsonl`` is neither."""
    whole = [path for ending in ENDINGS for path in files if path.name == name + ending]
    if len(whole) > 1:
        raise DataError(
            f"{where}: the split {name!r} is in several files there, {_listed([path.name for path in whole])}; leave "
            "only the one to use"
        )
    subsets = [path for path in files if path.name.startswith(f"{name}_")]
    if not whole and len(subsets) > 1:
        raise DataError(
            f"{where} has no {name}{ENDINGS[0]} but several subsets of it, "
            f"{_listed([path.name for path in subsets])}; name the one to use by task.train_split or task.eval_split"
        )
    return next(iter(whole + subsets), None)


def _from_hub(hub: str, names: Sequence[str], dataset: str) -> Split:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{dataset}: reading from the hub needs the package datasets: pip install 'deltasam[glue]'; or give a "
            f"local folder by --data or {VARIABLE}"
        ) from error
    path, _, configuration = hub.partition(":")
    if datasets.config.HF_HUB_OFFLINE:
        raise DataError(
            f"{dataset}: the hub is switched off (HF_HUB_OFFLINE); give a folder with "
            f"{dataset}/{names[0]}.jsonl.gz by --data or {VARIABLE}, or try a task without download: --task docstrings"
        )
    try:
        loaded = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # the hub's client raises errors of many kinds
        raise DataError(
            f"{dataset}: {hub} could not be loaded from the hub ({type(error).__name__}: {error}); give a local "
            f"folder by --data or {VARIABLE}"
        ) from error
    for name in names:
        if name in loaded:
            return Split(loaded[name].to_list(), f"hub:{hub}/{name}")
    raise DataError(
        f"{dataset}: there is no split {names[0]!r} in {hub} on the hub, which has {_listed(list(loaded))}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "nothing"
