"""Sentences of product reviews and tweets with their mean rating, from the source archive of a Python package.

The archive of vaderSentiment 0.5 (MIT licence) contains the sets of Hutto and Gilbert (ICWSM 2014): sentences that 20
people rated from -4 to 4. No text of it is in this project.
"""

from __future__ import annotations

import html
import io
import tarfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from deltasam.lab.tasks._cache import cache_folder
from deltasam.lab.tasks._data import DataError, Row, Split
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._tables import whole

ARCHIVE = "vaderSentiment-0.5.zip"
_INNER = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
_NEUTRAL = 0.5
_SPLIT = "validation"


@dataclass(frozen=True, kw_only=True)
class RatedSentenceTask(SentenceTask):
    """Sentences with a positive or negative mean rating, to evaluate models of SST-2 on other domains.

    The label is the sign of the mean rating. Sentences with a mean between -0.5 and 0.5 are left out, as SST-2 leaves
    out neutral ones: 2,977 sentences of product reviews and 3,432 tweets remain. The sets are meant for evaluation and
    have one split, ``validation``. To train on them, use parts of it: ``task.train_split=validation[:80%]
    task.eval_split=validation[80%:]``.

    The archive is read from the folder of the data (``--data``), or from ``data`` in the user's cache folder. If it is
    missing, the error contains the command that downloads it.

    Attributes:
        part: The set. The movie reviews of the same archive are not offered: SST-2 consists of these very sentences.
    """

    part: Literal["amazonReviewSnippets", "tweets"] = "amazonReviewSnippets"
    text: tuple[str, ...] = ("sentence",)
    classes: tuple[str, ...] = ("negative", "positive")
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return f"{ARCHIVE}, 2 MB, downloaded once with pip"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of ``validation``, or of a part, with their mean ``rating``."""
        if whole(split) != split:
            return super().read(source, split)
        if split != _SPLIT:
            raise DataError(
                f"{self.name}: there is no split {split!r}, only {_SPLIT}; to train, use parts of it: "
                f"task.train_split={_SPLIT}[:80%] task.eval_split={_SPLIT}[80%:]"
            )
        archive = self._archive(source)
        try:
            rows = _rows(archive, self.part)
        except (zipfile.BadZipFile, tarfile.TarError, KeyError, OSError, ValueError) as error:
            raise DataError(f"{self.name}: {archive} cannot be read ({error}); download it again") from error
        return Split([dict(row) for row in rows], f"{ARCHIVE}, {self.part}")

    def _archive(self, source: DataSource) -> Path:
        cache = cache_folder() / "data"
        folders = (cache,) if source.folder is None else (source.folder, cache)
        found = next((folder / ARCHIVE for folder in folders if (folder / ARCHIVE).is_file()), None)
        if found is None:
            raise DataError(
                f"{self.name}: {ARCHIVE} is not in {' or '.join(map(str, folders))}; download it with: "
                f"pip download --no-deps --no-binary :all: -d {cache} vaderSentiment==0.5"
            )
        return found


@lru_cache(maxsize=4)
def _rows(archive: Path, part: str) -> tuple[Row, ...]:
    with zipfile.ZipFile(archive) as outer, tarfile.open(fileobj=io.BytesIO(outer.read(_INNER))) as inner:
        file = inner.extractfile(f"hutto_ICWSM_2014/{part}_GroundTruth.txt")
        assert file is not None
        lines = file.read().decode("utf-8").splitlines()
    rows: dict[str, Row] = {}
    for line in lines:
        _, rating, sentence = line.split("\t")
        sentence = html.unescape(sentence).strip()
        if abs(float(rating)) >= _NEUTRAL:
            rows.setdefault(sentence, {"sentence": sentence, "label": int(float(rating) > 0), "rating": float(rating)})
    return tuple(rows.values())
