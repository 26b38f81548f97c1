"""The task from templates: balanced, reproducible, with the overlap that its heuristics promise."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from deltasam.lab.tasks import DataError, DataSource, find_task

TASK = find_task("hans-like")
SPLITS = {name: TASK.read(DataSource(), name).rows for name in ("train", "validation")}


def words(sentence: str) -> list[str]:
    return sentence.lower().replace(",", "").rstrip(".").split()


@pytest.mark.parametrize("rows", SPLITS.values(), ids=list(SPLITS))
def test_balance_and_distinct_pairs(rows: list[dict[str, str]]) -> None:
    assert set(Counter((row["heuristic"], row["label"]) for row in rows).values()) == {200}
    assert len({(row["premise"], row["hypothesis"]) for row in rows}) == len(rows) == 1200


def test_every_hypothesis_overlaps_as_its_heuristic_says() -> None:
    for row in SPLITS["train"] + SPLITS["validation"]:
        premise, hypothesis = words(row["premise"]), words(row["hypothesis"])
        assert set(hypothesis) <= set(premise), row
        if row["heuristic"] != "lexical overlap":
            assert f" {' '.join(hypothesis)} " in f" {' '.join(premise)} ", row


def test_the_splits_share_no_person() -> None:
    people = [{sentence for row in rows for sentence in [words(row["hypothesis"])[1]]} for rows in SPLITS.values()]
    assert not people[0] & people[1]


def test_the_rows_are_the_same_on_every_machine() -> None:
    text = "\n".join(f"{row['premise']}|{row['hypothesis']}|{row['label']}" for row in SPLITS["validation"])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "e96985d61ae39982"


def test_parts_have_both_labels() -> None:
    part = TASK.load(DataSource(), ["validation[:10%]"]).splits["validation[:10%]"]
    assert len(part) == 120
    assert 30 < sum(row["label"] for row in part) < 90


def test_errors() -> None:
    with pytest.raises(DataError, match=r"no split 'test', only train, validation"):
        TASK.load(DataSource(), ["test"])
