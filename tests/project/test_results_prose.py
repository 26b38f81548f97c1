"""Intervals and p-values that the sentences of the documentation name stand in one of its tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = r"-?\d+(?:\.\d+)?"
INTERVAL = re.compile(rf"(?<![\w.])({NUMBER})(?: (?:above|below|less|more))?\s+\[({NUMBER}), ({NUMBER})\]")
BY_ITSELF = re.compile(r"\(p = [\d.]+ by itself")  # before the correction: not in the tables

Interval = tuple[str, ...]


def split(text: str) -> tuple[str, str]:
    """The tables of figures, and the sentences; a table whose cells are sentences belongs to those."""
    tables, prose = [], []
    for line in text.splitlines():
        sentence = not line.startswith("|") or max(map(len, line.split("|"))) > 120
        (prose if sentence else tables).append(line.strip())
    return "\n".join(tables), " ".join(prose)


def is_rounded(told: Interval, exact: Interval) -> bool:
    """Whether the one is the other with fewer digits, or turned round (a - b told as b - a)."""
    same = all(_rounds(a, b) for a, b in zip(told, exact, strict=True))
    mean, low, high = told
    turned = (_negated(mean), _negated(high), _negated(low))
    return same or all(_rounds(a, b) for a, b in zip(turned, exact, strict=True))


def _rounds(told: str, exact: str) -> bool:
    digits = len(told.partition(".")[2])
    return len(exact.partition(".")[2]) >= digits and abs(float(told) - float(exact)) <= 0.5001 * 10**-digits


def _negated(number: str) -> str:
    return number[1:] if number.startswith("-") else f"-{number}"


@pytest.fixture(scope="module")
def tables() -> str:
    return split((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))[0]


@pytest.mark.parametrize(("page", "least"), [("docs/results.md", 30), ("README.md", 0), ("docs/methods.md", 0)])
def test_an_interval_that_is_told_is_in_a_table(page: str, least: int, tables: str) -> None:
    told = INTERVAL.findall(split((ROOT / page).read_text(encoding="utf-8"))[1])
    known = INTERVAL.findall(tables)
    assert len(told) >= least
    assert [each for each in told if not any(is_rounded(each, exact) for exact in known)] == []


def test_a_p_value_that_is_told_is_in_a_table(tables: str) -> None:
    prose = BY_ITSELF.sub("", split((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))[1])
    told = set(re.findall(r"p = (0\.\d+)", prose))
    assert len(told) >= 4
    assert told - set(re.findall(r"p = ([\d.]+)\)", tables)) == set()


def test_rounding_and_turning() -> None:
    assert is_rounded(("2.4", "1.4", "3.3"), ("2.38", "1.35", "3.32"))
    assert is_rounded(("2.3", "0.9", "3.7"), ("-2.32", "-3.65", "-0.86"))
    assert not is_rounded(("2.4", "1.4", "3.4"), ("2.38", "1.35", "3.32"))
    assert not is_rounded(("2.40", "1.35", "3.32"), ("2.4", "1.4", "3.3"))
