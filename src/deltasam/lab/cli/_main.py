"""Finds the command that was asked for and runs it; imports nothing heavy before that."""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

from deltasam.lab.cli._commands import COMMANDS
from deltasam.lab.cli._errors import CommandError, InputError

USAGE_ERROR = 2  # what tyro and argparse exit with
_WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or "),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "mind its permissions, or "),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words after ``deltasam``; those of the process by default.

    Returns:
        The exit code: 0; 1 for a mistake the command reports; 2 for an unknown command or option; 130 when stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _answer(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `deltasam ... | head`: the reader has gone; the interpreter's last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"deltasam {_match(words)}: interrupted", file=sys.stderr)
        return 130


def _answer(words: Sequence[str]) -> int:
    if words[:1] in (["--version"], ["-V"]):
        from deltasam import __version__

        print(f"deltasam {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return 0
    name = _match(words)
    if name is None:
        return _not_a_command(words)
    return _run(name, words[len(name.split()) :])


def help_text(group: str = "") -> str:
    """The list of commands, or of those whose name starts with the word ``group``."""
    shown = {name: command for name, command in COMMANDS.items() if not group or name.split()[0] == group}
    width = max(map(len, shown))
    lines = [f"usage: deltasam {group or 'COMMAND'} ... [--help]", ""]
    if not group:
        lines += ["Sharpness-aware fine-tuning of language models, per instance.", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    lines += ["", f"deltasam {next(iter(shown))} --help tells the options of a command."]
    return "\n".join(lines)


def _match(words: Sequence[str]) -> str | None:
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return name
    return None


def _not_a_command(words: Sequence[str]) -> int:
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    first = words[0]
    if first in groups:
        rest = [word for word in words[1:] if not word.startswith("-")]
        asked_for_help = not rest and bool(set(words[1:]) & {"-h", "--help"})
        if asked_for_help:
            print(help_text(first))
            return 0
        if not rest:
            print(help_text(first), file=sys.stderr)
            return USAGE_ERROR
    typed = " ".join(words[:2]) if first in groups else first
    known = [*COMMANDS, *sorted(groups)]
    close = difflib.get_close_matches(typed, known, n=1, cutoff=0.5)
    hint = f" Did you mean `deltasam {close[0]}`?" if close else ""
    print(f"deltasam: unknown command {typed!r}.{hint} `deltasam --help` lists the commands.", file=sys.stderr)
    return USAGE_ERROR


def _run(name: str, arguments: Sequence[str]) -> int:
    import tyro

    from deltasam.lab.plugins import PluginError

    # --json, not also --no-json; and `--seed INT`, not `--seed {None}|INT`
    options = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)

    try:
        kind = COMMANDS[name].load()
        words = getattr(kind, "arranged", list)(arguments)
        _check_once(kind, words)
        # The whole docstring: of its own accord tyro leaves out the examples.
        described, about = _without_empty_defaults(kind), inspect.getdoc(kind)
        command = tyro.cli(described, args=words, prog=f"deltasam {name}", description=about, config=options)
        return int(command.run() or 0)
    except CommandError as error:
        print(f"deltasam {name}: {error}", file=sys.stderr)
        return error.exit_code
    except PluginError as error:  # any command that looks up a name may be the first to import them
        print(f"deltasam {name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno is None:  # None: a library's own words, or a bug
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        way_out = f"{_WAYS_OUT.get(error.errno, '')}choose another place"
        print(f"deltasam {name}: {where}{error.strerror}; {way_out}", file=sys.stderr)
        return 1


def _without_empty_defaults(kind: Any) -> Any:
    """The same command, whose help leaves out defaults that say nothing: None, an empty list, a flag that is off.

    What happens without such an option is told in its own words.
    """
    import tyro

    hints = get_type_hints(kind, include_extras=True)
    silent = [
        f.name
        for f in fields(kind)
        if f.default is None or f.default == () or isinstance(f.default, bool)
        or (f.default is MISSING and "tuple[" in str(f.type))  # tyro has () for it
    ]  # fmt: skip
    unsaid = {name: Annotated[hints[name], tyro.conf.arg(help_behavior_hint="")] for name in silent}
    return type(kind.__name__, (kind,), {"__annotations__": unsaid, "__module__": kind.__module__})


def _check_once(kind: Any, words: Sequence[str]) -> None:
    """Of an option with several values that stands there twice only the last one would count, without a word."""
    for field in fields(kind):
        flag = f"--{field.name.replace('_', '-')}"
        if str(field.type).startswith("tuple[") and words.count(flag) > 1:
            raise InputError(f"{flag} stands there twice; name all its values after one, as in {flag} A B")
