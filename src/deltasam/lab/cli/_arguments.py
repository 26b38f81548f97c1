"""Checks and hints for the arguments of a command, before tyro parses them."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from deltasam.lab.cli._errors import InputError

# Names in version 0.1. They work until version 0.3, with a note on stderr.
_RENAMED = {"--on": "--backend", "--show": "--dry-run", "--no-field": "--no-third-party"}
_SETTINGS = "write settings of the run as section.option=value, such as method.rho=0.02 schedule.epochs=1"


def arranged(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments as tyro expects them: current option names, settings at the end.

    Args:
        kind: The dataclass of the command. If it has ``setting_hint``, settings may be anywhere among the arguments.
        arguments: The arguments of the command.

    Raises:
        InputError: An option is unknown, or an option that takes several values is given twice.
    """
    names = {field.name for field in fields(kind)}
    words = [_renamed(word, names) for word in arguments]
    _check_given_once(kind, words)
    return _settings_last(kind, words) if hasattr(kind, "setting_hint") else words


def check_positive(**options: float | None) -> None:
    """Raises an InputError for an option that is not finite and greater than 0. None means the default."""
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0")


def _renamed(word: str, names: set[str]) -> str:
    flag, equals, value = word.partition("=")
    new = _RENAMED.get(flag, "")
    if new.removeprefix("--").removeprefix("no-").replace("-", "_") not in names:
        return word
    print(f"deltasam: {flag} is now called {new}; the old name will be removed in version 0.3", file=sys.stderr)
    return new + equals + value


def _check_given_once(kind: Any, words: Sequence[str]) -> None:
    """Refuses an option with several values that is given twice: tyro would keep the last one only."""
    for field in fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        if str(field.type).startswith("tuple[") and words.count(flag) > 1:
            raise InputError(f"{flag} is given twice; put all values after one {flag}, as in {flag} A B")


def _settings_last(kind: Any, words: Sequence[str]) -> list[str]:
    """Moves the settings to the end, the only place where tyro accepts them."""
    options = {field.name.replace("_", "-"): field for field in fields(kind) if field.name != "settings"}
    settings: list[str] = []
    others: list[str] = []
    takes_value = takes_more = False
    takes_words = any(str(field.type).startswith("Positional[") for field in options.values())
    for word in words:
        stray = not takes_more and not takes_words  # a mistake: reading it as a setting gives the clearer error
        is_setting = ("=" in word or stray) and not word.startswith("-") and not takes_value
        (settings if is_setting else others).append(word)
        takes_value = False
        if word.startswith("--"):
            name, equals, _ = word[2:].replace("_", "-").partition("=")
            of_tyro = name.startswith("tyro-")
            if name not in (*options, "help") and not of_tyro:
                raise InputError(f"--{name}: unknown option; {_hint(kind, name, list(options))}")
            of = "str" if of_tyro else str(options[name].type) if name in options else "bool"
            takes_value = not equals and of != "bool"
            takes_more = takes_value and of.startswith("tuple[")
    # After "--", so that an option with several values does not take them.
    return [*others, "--", *settings] if settings else others


def _hint(kind: Any, name: str, options: Sequence[str]) -> str:
    """Names the option or the setting that was probably meant, or how to write settings."""
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    if close:
        return f"did you mean --{close[0]}?"
    setting = kind.setting_hint(name).rstrip("?")
    return f"{setting}=... (without --)?" if setting else f"{_SETTINGS}; `deltasam train --dry-run` prints all"
