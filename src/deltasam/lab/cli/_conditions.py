"""The flat metrics of a run by the condition that they were measured under."""

from __future__ import annotations

import re
from collections.abc import Mapping

AS_TRAINED = "as trained"
FULL = 32  # bits of the weights as they were trained

_NAME = re.compile(
    r"(?P<name>.+?)(?P<scaled>_scaled)?"
    r"(?:_(?P<bits>\d+)bit(?P<channel>_channel)?|_torchao_(?P<kind>int\d+)|_on_(?P<other>.+))?"
)


def by_condition(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns the metrics of each condition without its suffix.

    Example:
        >>> by_condition({"accuracy": 0.8, "nll_scaled": 0.5, "accuracy_4bit": 0.7, "ece_low_on_qqp": 0.1})
        {'as trained': {'accuracy': 0.8}, 'temperature-scaled': {'nll': 0.5}, \
'4 bits, groups of 64': {'accuracy': 0.7}, 'on qqp': {'ece_low': 0.1}}
    """
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        match = _NAME.fullmatch(key)
        assert match is not None
        found.setdefault(_condition(match), {})[match["name"]] = value
    return found


def by_bits(metrics: Mapping[str, float], name: str) -> dict[str, dict[int, float]]:
    """Returns a metric by the number of bits, for each kind of rounding that was measured.

    Example:
        >>> by_bits({"accuracy": 0.8, "accuracy_8bit": 0.8, "accuracy_4bit": 0.7, "f1_8bit": 0.9}, "accuracy")
        {'groups of 64': {32: 0.8, 8: 0.8, 4: 0.7}}
    """
    found: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        match = _NAME.fullmatch(key)
        if match is not None and match["name"] == name and match["bits"] and not match["scaled"]:
            found.setdefault(_rounding(match), {FULL: metrics[name]})[int(match["bits"])] = value
    return found


def _condition(match: re.Match[str]) -> str:
    parts = []
    if match["bits"]:
        parts.append(f"{match['bits']} bits, {_rounding(match)}")
    elif match["kind"]:
        parts.append(f"torchao, {match['kind']}")
    elif match["other"]:
        parts.append(f"on {match['other']}")
    return ", ".join(parts + ["temperature-scaled"] * bool(match["scaled"])) or AS_TRAINED


def _rounding(match: re.Match[str]) -> str:
    return "channels" if match["channel"] else "groups of 64"
