"""General text on which forgetting is measured: the user's, Wikipedia's from the data folder, or Python's own."""

from __future__ import annotations

import random
import re
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Split
from deltasam.lab.tasks._source import DataSource

_PARAGRAPH = re.compile(r"\n\s*\n")
_FEWEST_WORDS = 10  # of a paragraph; less is a heading, or code
_WIKIPEDIA = ("mirror_wiki", "random_10k", "sentence")


def general_texts(file: str, source: DataSource, rows: int) -> Split:
    """Returns a fixed random sample of paragraphs or sentences, in rows with the column ``text``.

    Args:
        file: A text file of the user, whose paragraphs are separated by empty lines. If empty, the sentences of
            Wikipedia in the data folder (``mirror_wiki/random_10k``) are used, and without them the topics of Python's
            ``help()``, which are on every machine.
        source: The data folder, or the hub, from which nothing is downloaded for this.
        rows: Size of the sample.

    Raises:
        DataError: The file does not exist, is not text, or has no paragraph of ten words.
    """
    texts, origin = _texts(file, source)
    found = [" ".join(text.split()) for text in texts if len(text.split()) >= _FEWEST_WORDS]
    if not found:
        raise DataError(f"{origin}: there is no paragraph of {_FEWEST_WORDS} words or more to measure forgetting on")
    kept = sorted(random.Random(0).sample(range(len(found)), min(rows, len(found))))
    return Split([{"text": found[index]} for index in kept], origin)


def _texts(file: str, source: DataSource) -> tuple[list[str], str]:
    if file:
        path = Path(file).expanduser()
        try:
            return _PARAGRAPH.split(path.read_text(encoding="utf-8")), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"task.general={file}: cannot be read as text ({error})") from error
    dataset, split, column = _WIKIPEDIA
    if source.folder is not None and (source.folder / dataset).is_dir():
        try:
            found = source.split(dataset, (split,), None)
        except DataError:
            pass  # the folder has another corpus
        else:
            return [str(row.get(column, "")) for row in found.rows], found.origin
    from pydoc_data.topics import topics

    return [text for topic in sorted(topics) for text in _PARAGRAPH.split(topics[topic])], "topics of Python's help()"
