"""Forgetting is the rise of the loss on general text; measured on different texts, it cannot be compared.

A machine without the text of the data folder measures on the topics of Python's ``help()``, which are everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

ORIGIN = "general text"
"""Where ``origins`` of a result names the text."""
_METRICS = frozenset({"general_nll", "general_nll_before", "forgetting"})


def on_another_text(runs: Sequence[tuple[Hashable, str]]) -> list[bool]:
    """For the setup and the text of each run: whether most runs of the setup that read a text read another one.

    Example:
        >>> on_another_text([("mnli", "help"), ("mnli", "wikipedia"), ("mnli", "wikipedia"), ("mnli", "")])
        [True, False, False, False]
    """
    texts: dict[Hashable, Counter[str]] = {}
    for setup, text in runs:
        if text:
            texts.setdefault(setup, Counter())[text] += 1
    return [bool(text) and text != texts[setup].most_common(1)[0][0] for setup, text in runs]


def without_text(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that do not depend on general text."""
    return {name: value for name, value in metrics.items() if name not in _METRICS}
