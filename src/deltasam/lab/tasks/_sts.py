"""Semantic textual similarity: Spearman correlation of cosines with human scores, in the "all" setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deltasam.lab.tasks._checks import check_columns, check_texts, scores
from deltasam.lab.tasks._data import Row, Split
from deltasam.lab.tasks._metrics import METRICS
from deltasam.lab.tasks._source import DataSource

#: The seven test sets of the paper: name (also of the local folder) -> dataset on the hub.
STS_SETS: dict[str, str] = {
    **{f"sts{year}": f"mteb/sts{year}-sts" for year in (12, 13, 14, 15, 16)},
    "stsb": "mteb/stsbenchmark-sts",
    "sickr": "mteb/sickr-sts",
}
_COLUMNS = ("sentence1", "sentence2", "score")


def read_sts(source: DataSource, sets: Sequence[str], split: str) -> Split:
    """Returns the scored pairs of several sets in one table, with the name of the set in the column ``set``."""
    rows: list[Row] = []
    origins = []
    for name in sets:
        found = source.split(name, (split,), STS_SETS[name])
        check_columns(found.rows, _COLUMNS, found.origin)
        scored = [row for row in found.rows if row["score"] not in (None, "")]
        check_texts(scored, _COLUMNS[:2], found.origin, allow_empty=True)
        values = scores(scored, "score", found.origin)
        rows += [
            {"set": name, "sentence1": row["sentence1"], "sentence2": row["sentence2"], "score": value}
            for row, value in zip(scored, values, strict=True)
        ]
        origins.append(found.origin)
    return Split(rows, ", ".join(origins))


def sts_scores(first: Tensor, second: Tensor, rows: Sequence[Row]) -> dict[str, float]:
    """Returns the Spearman correlation of each set, over all of its pairs, and the mean ``sts_average``."""
    cosines = F.cosine_similarity(first.double(), second.double()).numpy()
    found = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        where = [index for index, row in enumerate(rows) if row["set"] == name]
        found[name] = METRICS["spearman"](cosines[where], [rows[index]["score"] for index in where])
    return {"sts_average": sum(found.values()) / len(found), **found}


def embed_unique(sentences: Sequence[str], embed: Callable[[list[str]], Tensor], batch_size: int) -> dict[str, Tensor]:
    """Returns the embedding of each sentence. Computes each once, in batches of similar length."""
    unique = sorted(set(sentences), key=lambda sentence: (len(sentence), sentence))
    parts = [embed(unique[i : i + batch_size]) for i in range(0, len(unique), batch_size)]
    return dict(zip(unique, torch.cat(parts), strict=True))
