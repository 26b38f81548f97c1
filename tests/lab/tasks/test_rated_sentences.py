"""Product reviews and tweets from an archive: labels from ratings, where the archive is looked for, errors."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from deltasam.lab.tasks import DataError, DataSource, find_task
from deltasam.lab.tasks._cache import CACHE_VARIABLE, cache_folder
from deltasam.lab.tasks._rated_sentences import ARCHIVE

TASK = find_task("product-reviews")
LINES = (
    "1_1\t2.5\tGood &amp; cheap. ",
    "1_2\t-0.5\tToo loud.",
    "2_1\t0.45\tIt has two buttons.",
    "2_2\t-3\tToo loud.",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an archive of four sentences; the cache is empty."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    text = "\r\n".join(LINES).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as inner:
        entry = tarfile.TarInfo("hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt")
        entry.size = len(text)
        inner.addfile(entry, io.BytesIO(text))
    made = tmp_path / "data"
    made.mkdir()
    with zipfile.ZipFile(made / ARCHIVE, "w") as outer:
        outer.writestr("vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz", packed.getvalue())
    return made


def test_labels_are_signs_without_neutral_and_repeated_sentences(folder: Path) -> None:
    data = TASK.load(DataSource(folder), ["validation"])
    assert data.splits["validation"] == [
        {"sentence": "Good & cheap.", "label": 1},
        {"sentence": "Too loud.", "label": 0},
    ]
    assert data.classes == ("negative", "positive") == find_task("sst2").classes


def test_the_cache_is_searched_too(folder: Path) -> None:
    (cache_folder() / "data").mkdir(parents=True)
    (folder / ARCHIVE).rename(cache_folder() / "data" / ARCHIVE)
    for source in (DataSource(), DataSource(folder)):
        assert len(TASK.load(source, ["validation"]).splits["validation"]) == 2


def test_errors_contain_the_remedy(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'train'.*task.train_split=validation\[:80%\]"):
        TASK.load(DataSource(folder))
    with pytest.raises(DataError, match=r"pip download .* -d \S+cache/data vaderSentiment==0.5"):
        TASK.load(DataSource(), ["validation"])
    with pytest.raises(DataError, match=r"cannot be read .*tweets.*download it again"):
        find_task("tweets").load(DataSource(folder), ["validation"])
    (folder / ARCHIVE).write_bytes(b"an error page")
    with pytest.raises(DataError, match=r"cannot be read"):
        find_task("tweets").load(DataSource(folder), ["validation"])


@pytest.mark.parametrize(("name", "size", "positive"), [("product-reviews", 2977, 1744), ("tweets", 3432, 2345)])
def test_the_real_archive(name: str, size: int, positive: int) -> None:
    if not (cache_folder() / "data" / ARCHIVE).is_file():
        pytest.skip(f"{ARCHIVE} is not in the cache")
    rows = find_task(name).load(DataSource(), ["validation"]).splits["validation"]
    assert (len(rows), sum(row["label"] for row in rows)) == (size, positive)
