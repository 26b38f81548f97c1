"""Counts of wins, as the paper counts them: in how many of the setups is one method better than another."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from deltasam.step.names import counted

Setup = TypeVar("Setup", bound=Hashable)

_TIE = 1e-9  # relative; far above rounding, far below one answer in a million


@dataclass(frozen=True, kw_only=True)
class Wins:
    """In how many setups a method is better.

    Attributes:
        wins: Setups in which it is strictly better.
        ties: Setups in which both are equal.
        setups: Setups that both have.
    """

    wins: int
    ties: int
    setups: int

    def __str__(self) -> str:
        return f"{self.wins} of {self.setups}" + (f" ({counted(self.ties, 'tie')})" if self.ties else "")


def count_wins(
    first: Mapping[Setup, float],
    second: Mapping[Setup, float],
    *,
    lower_is_better: Collection[Setup] = (),
) -> Wins:
    """In how many setups the first method is better than the second; setups that one of them lacks do not count.

    Args:
        first: Value of the first method by setup, such as (model, task).
        second: Value of the second method by setup.
        lower_is_better: The setups in which the smaller value wins.

    Returns:
        The counts.

    Example:
        >>> str(count_wins({"MRPC": 89.5, "QNLI": 91.5, "RTE": 72.2}, {"MRPC": 88.2, "QNLI": 91.7, "RTE": 69.3}))
        '2 of 3'
    """
    lower = set(lower_is_better)
    leads = [_lead(second[s], first[s]) if s in lower else _lead(first[s], second[s]) for s in first if s in second]
    return Wins(wins=sum(lead > 0 for lead in leads), ties=sum(lead == 0 for lead in leads), setups=len(leads))


def _lead(first: float, second: float) -> float:
    """By how much the first is larger; means of as many right answers are equal, though their last bits may not be."""
    return 0.0 if math.isclose(first, second, rel_tol=_TIE) else first - second
