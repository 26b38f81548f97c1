"""Names in messages: look-up in any spelling, suggestions for unknown names, plurals."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def normalized(name: str) -> str:
    """A name without case and separators: ``DeltaSAM``, ``delta-sam`` and ``delta_sam`` are the same."""
    return name.lower().replace("-", "").replace("_", "")


def look_up(table: Mapping[str, Entry], name: str) -> Entry | None:
    """The entry of this name in any spelling; None if there is none.

    Example:
        >>> look_up({"DeltaSAM": 1, "My_SAM": 2}, "delta-sam"), look_up({"My_SAM": 2}, "my-sam"), look_up({}, "sam")
        (1, 2, None)
    """
    return next((entry for known, entry in table.items() if normalized(known) == normalized(name)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean ...?`` with the nearest name, or a list of all names."""
    names = list(known)
    by_spelling = {normalized(known_name): known_name for known_name in names}
    close = difflib.get_close_matches(normalized(name), by_spelling, n=1, cutoff=0.6)
    return f"did you mean {by_spelling[close[0]]}?" if close else f"there are {', '.join(names)}"


def pluralized(number: int, what: str) -> str:
    """A number and a noun, in the plural unless the number is 1.

    Example:
        >>> pluralized(1, "run"), pluralized(0, "run")
        ('1 run', '0 runs')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
