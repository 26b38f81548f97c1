"""Names as people write them: found however they are spelled, the nearest where there is none; numbers of things."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def spelled(name: str) -> str:
    """A name as it is compared: ``DeltaSAM``, ``delta-sam`` and ``delta_sam`` are the same."""
    return name.lower().replace("-", "").replace("_", "")


def look_up(table: Mapping[str, Entry], name: str) -> Entry | None:
    """The entry of this name, however it is spelled; None if there is none.

    Example:
        >>> look_up({"DeltaSAM": 1, "My_SAM": 2}, "delta-sam"), look_up({"My_SAM": 2}, "my-sam"), look_up({}, "sam")
        (1, 2, None)
    """
    return next((entry for known, entry in table.items() if spelled(known) == spelled(name)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean ...?``, or all that is known."""
    names = list(known)
    by_spelling = {spelled(known_name): known_name for known_name in names}
    close = difflib.get_close_matches(spelled(name), by_spelling, n=1, cutoff=0.6)
    return f"did you mean {by_spelling[close[0]]}?" if close else f"there are {', '.join(names)}"


def counted(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "run"), counted(0, "run")
        ('1 run', '0 runs')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
