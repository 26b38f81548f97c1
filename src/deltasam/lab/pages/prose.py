"""Checks the text around the tables: its numbers are in generated files, and every generated file is shown.

The front page of the results has no typed result at all: its numbers are inserted by name (``{{ name }}``).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

FRONT = Path("docs") / "results.md"
MOST_WORDS = 1500
NUMBERED = ("README.md", "docs/methods.md", "docs/results.md", "docs/results/*.md")
"""The pages whose intervals are compared with the tables."""

_NUMBER = r"-?\d+(?:\.\d+)?"
_INTERVAL = re.compile(rf"(?<![\w.])({_NUMBER})(?: (?:above|below|less|more))?\s+\[({_NUMBER}),\s+({_NUMBER})\]")
_P = re.compile(r"p = (0\.\d+)")
_FENCE = re.compile(r"^```.*?^```$", flags=re.M | re.S)
_NAME = re.compile(r"{{ *(\w+) *}}")


def problems(root: Path) -> list[str]:
    """What is wrong with the pages of a checkout, a sentence each."""
    return [*_numbers(root), *_shown(root), *_front(root)]


def intervals(text: str) -> list[tuple[str, ...]]:
    """The intervals of a text, such as ``0.4 [0.2, 0.6]``: mean and ends as they are written."""
    return _INTERVAL.findall(text)


def is_rounded(shown: tuple[str, ...], exact: tuple[str, ...]) -> bool:
    """Whether one interval is the other with fewer digits, or with the opposite sign (a - b given as b - a)."""
    digits = [len(number.partition(".")[2]) for number in shown]
    if any(len(number.partition(".")[2]) < d for number, d in zip(exact, digits, strict=True)):
        return False
    mean, low, high = map(float, exact)
    return any(
        all(abs(float(a) - b) <= 0.5001 * 10**-d for a, b, d in zip(shown, given, digits, strict=True))
        for given in ((mean, low, high), (-mean, -high, -low))
    )


def _size(interval: tuple[str, ...]) -> float:
    return abs(float(interval[0]))


def words(text: str) -> int:
    """The number of words that a reader sees: without directives, table rules and the targets of links."""
    visible = re.sub(r"\]\([^)]*\)", "]", _FENCE.sub("", text))
    return len([word for word in re.split(r"[\s|]+", visible) if re.search(r"\w", word)])


def _numbers(root: Path) -> Iterator[str]:
    """Intervals and p-values in the text that no generated file has."""
    generated = [path for path in _generated(root) if path.suffix in (".md", ".json")]
    tables = "\n".join(path.read_text(encoding="utf-8") for path in generated)
    known, known_p = sorted(set(intervals(tables)), key=_size), set(re.findall(r"p = ([\d.]+\d)", tables))
    sizes = [_size(exact) for exact in known]
    for page in sorted(path for pattern in NUMBERED for path in root.glob(pattern)):
        text, name = page.read_text(encoding="utf-8"), page.relative_to(root)
        for shown in intervals(text):
            near = slice(bisect_left(sizes, _size(shown) - 1), bisect_right(sizes, _size(shown) + 1))
            if not any(is_rounded(shown, exact) for exact in known[near]):
                yield f"{name}: {shown[0]} [{shown[1]}, {shown[2]}] is in no table of docs/_generated"
        if page.is_relative_to(root / "docs" / "results") or name == FRONT:
            for p in sorted(set(_P.findall(text)) - known_p):
                yield f"{name}: p = {p} is in no table of docs/_generated"


def _shown(root: Path) -> Iterator[str]:
    """Generated files and answers that no page shows, and pages that show what does not exist."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in _pages(root))
    files = {path.name for path in _generated(root)}
    wanted = set(re.findall(r"_generated/([\w.-]+)", text)) | {"answers.json"}  # read by docs/conf.py
    yield from (f"docs/_generated/{name} is on no page" for name in sorted(files - wanted))
    yield from (f"a page shows docs/_generated/{name}, which is not generated" for name in sorted(wanted - files))
    used, known = set(_NAME.findall(text)), set(_answers(root))
    yield from (f"no page shows the answer {name}" for name in sorted(known - used))
    yield from (f"a page shows {{{{ {name} }}}}, which is no answer" for name in sorted(used - known))


def _front(root: Path) -> Iterator[str]:
    """The front page is short, and its decimals are settings in code or inserted by name."""
    text = (root / FRONT).read_text(encoding="utf-8")
    answers = _answers(root)
    count = words(_NAME.sub(lambda name: answers.get(name[1], ""), text))
    if count > MOST_WORDS:
        yield f"{FRONT} has {count} words; at most {MOST_WORDS}"
    typed = re.sub(r"`[^`]*`|\]\([^)]*\)|p ≤ 0\.05", "", _FENCE.sub("", text))
    for number in re.findall(r"(?<![\w.])-?\d+\.\d+", typed):
        yield f"{FRONT}: {number} is typed; insert an answer, or write a setting as code"


def _pages(root: Path) -> Iterable[Path]:
    hidden = (root / "docs" / "_generated", root / "docs" / "_build")
    return [page for page in (root / "docs").rglob("*.md") if not any(page.is_relative_to(at) for at in hidden)]


def _generated(root: Path) -> list[Path]:
    return sorted((root / "docs" / "_generated").iterdir())


def _answers(root: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((root / "docs" / "_generated" / "answers.json").read_text(encoding="utf-8"))
    return found
