"""Finds the command that was called and runs it. Nothing heavy is imported before that."""

from __future__ import annotations

import difflib
import errno
import inspect
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

from deltasam.lab.cli._arguments import arranged
from deltasam.lab.cli._commands import COMMANDS
from deltasam.lab.cli._errors import CommandError

USAGE_ERROR = 2  # the exit code of tyro and argparse
_NARROWEST = 40  # columns
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or "),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check its permissions, or "),
}
_EXTRAS = {
    **dict.fromkeys(("accelerate", "datasets", "filelock", "jinja2", "matplotlib", "pandas", "rouge_score"), "lab"),
    **dict.fromkeys(("scipy", "sklearn", "transformers"), "lab"),
    "gguf": "llm", "optuna": "search", "peft": "peft", "ray": "cluster", "sentence_transformers": "sts",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after ``deltasam``. Defaults to those of the process.

    Returns:
        The exit code: 0 on success, 1 for an error that the command reports, 2 for bad input or an unknown command or
        option, 75 for a run that was stopped and can go on, 130 for Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # signs such as "−" that a locale lacks become question marks
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `deltasam ... | head`: the reader is gone, and the last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"deltasam {find_command(words)}: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: Sequence[str]) -> int:
    if words[:1] in (["--version"], ["-V"]):
        from deltasam import __version__

        print(f"deltasam {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return 0
    name = find_command(words)
    if name is None:
        return _unknown_command(words)
    return _run(name, words[len(name.split()) :])


def help_text(group: str = "") -> str:
    """Returns the list of commands, or of those whose name starts with the word ``group``."""
    shown = {name: command for name, command in COMMANDS.items() if not group or name.split()[0] == group}
    width = max(map(len, shown))
    lines = [f"usage: deltasam {group or 'COMMAND'} ... [--help]", ""]
    if not group:
        lines += ["Sharpness-aware fine-tuning of language models, per instance.", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    lines += ["", f"Run `deltasam {next(iter(shown))} --help` for the options of a command."]
    return "\n".join(lines)


def find_command(words: Sequence[str]) -> str | None:
    """Returns the name of the command that the arguments start with, or None."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)


def _unknown_command(words: Sequence[str]) -> int:
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    first, *rest = words
    if first in groups and all(word.startswith("-") for word in rest):
        asked_for_help = bool({"-h", "--help"} & set(rest))
        print(help_text(first), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else USAGE_ERROR
    typed = " ".join(words[:2]) if first in groups else first
    close = difflib.get_close_matches(typed, [*COMMANDS, *sorted(groups)], n=1, cutoff=0.5)
    hint = f" Did you mean `deltasam {close[0]}`?" if close else ""
    print(f"deltasam: unknown command {typed!r}.{hint} `deltasam --help` lists the commands.", file=sys.stderr)
    return USAGE_ERROR


def _run(name: str, arguments: Sequence[str]) -> int:
    import tyro

    from deltasam.lab.plugins import PluginError

    # --json without --no-json; `--seed INT` instead of `--seed {None}|INT`
    options = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)

    try:
        kind = COMMANDS[name].load()
        words = arranged(kind, arguments)
        # The whole docstring: by default tyro leaves out the examples.
        described, about = _hide_empty_defaults(kind), inspect.getdoc(kind)
        with _wide_enough():
            command = tyro.cli(described, args=words, prog=f"deltasam {name}", description=about, config=options)
        return int(command.run() or 0)
    except CommandError as error:
        message, code = str(error), error.exit_code
    except PluginError as error:  # raised by the first command that looks up a name
        message, code = str(error), USAGE_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        message, code = f"needs {package}, which is not installed: pip install 'deltasam[{_EXTRAS[package]}]'", 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno is None:  # None: raised by a library, or a bug
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        message, code = f"{where}{error.strerror}; {_REMEDIES.get(error.errno, '')}choose another place", 1
    print(f"deltasam {name}: {message}", file=sys.stderr)
    return code


@contextmanager
def _wide_enough() -> Iterator[None]:
    """Lets tyro write for at least 40 columns: below 10 its help never ends."""
    given = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns >= _NARROWEST:
        yield
        return
    os.environ["COLUMNS"] = str(_NARROWEST)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if given is not None:
            os.environ["COLUMNS"] = given


def _hide_empty_defaults(kind: Any) -> Any:
    """Returns the same command, whose help omits empty defaults: None, an empty list, a flag that is off.

    The help text of such an option describes what happens without it.
    """
    import tyro

    hints = get_type_hints(kind, include_extras=True)
    empty = [
        f.name
        for f in fields(kind)
        if f.default is None or f.default == () or isinstance(f.default, bool)
        or (f.default is MISSING and "tuple[" in str(f.type))  # tyro shows () for it
    ]  # fmt: skip
    hidden = {name: Annotated[hints[name], tyro.conf.arg(help_behavior_hint="")] for name in empty}
    return type(kind.__name__, (kind,), {"__annotations__": hidden, "__module__": kind.__module__})
