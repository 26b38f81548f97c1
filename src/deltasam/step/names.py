"""Names in messages: look-up in any spelling, suggestions for unknown names, plurals."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def normalized(name: str) -> str:
    """A name without case and separators: ``DeltaSAM``, ``delta-sam`` and ``delta_sam`` are the same."""
    return name.lower().replace("-", "").replace("_", "")


def method_key(name: str) -> str:
    """One form of all names that people write for a method, such as ``PerInstanceSAM`` and ``per-instance``.

    Case, separators and a final ``SAM`` do not count, ``δ`` is ``delta``, and plain training is ``ERM``. Short names
    such as ``ASAM`` keep their end, which is most of the name.

    Example:
        >>> method_key("per-instance") == method_key("PerInstanceSAM"), method_key("δ-SAM") == method_key("delta_sam")
        (True, True)
        >>> method_key("SAM"), method_key("A-SAM"), method_key("plain")
        ('sam', 'asam', 'erm')
    """
    key = normalized(name.replace("δ", "delta")).replace(" ", "")
    short = key.removesuffix("sam")
    return "erm" if key == "plain" else short if len(short) > 2 else key


def look_up(table: Mapping[str, Entry], name: str, key: Callable[[str], str] = normalized) -> Entry | None:
    """The entry of this name in any spelling; None if there is none.

    Args:
        table: The entries.
        name: The name.
        key: Names with the same key are the same; :func:`method_key` for methods.

    Example:
        >>> look_up({"DeltaSAM": 1, "My_SAM": 2}, "delta-sam"), look_up({"My_SAM": 2}, "my-sam"), look_up({}, "sam")
        (1, 2, None)
    """
    return next((entry for known, entry in table.items() if key(known) == key(name)), None)


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
