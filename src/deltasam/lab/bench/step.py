"""Runs the step benchmark; ``python -m deltasam.lab.bench.step`` needs only torch and transformers."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import util
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from deltasam.lab.bench.options import StepOptions


def run(options: StepOptions) -> Any:
    """Measures, prints the table and writes the files.

    Returns:
        The :class:`~deltasam.lab.bench.report.Report`.

    Raises:
        ValueError: The plot cannot be drawn. Raised before anything is measured.
    """
    if options.plot is not None:
        _check_plot(options.plot)
    from deltasam.lab.bench import report
    from deltasam.lab.bench._measure import measure
    from deltasam.lab.bench._output import write_record

    result = measure(options)
    report.show(result)
    if options.json is not None:
        write_record(report.record(result), options.json)
    if options.plot is not None:
        from deltasam.lab.bench._plot import plot

        plot(result, options.plot)
    return result


def _check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot={path} must end in .png, .pdf or .svg")
    if util.find_spec("matplotlib") is None:
        raise ValueError(f"plot={path} needs matplotlib: pip install 'deltasam[lab]'")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line without tyro. It reads the same options from the same dataclass."""
    given = sys.argv[1:] if argv is None else argv
    # Options may have underscores, such as --compile_mode.
    words = [re.sub(r"^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in given]
    arguments = vars(_parser().parse_args(words))
    try:
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in arguments.items()}
        run(StepOptions(**values))
    except ValueError as error:
        print(f"deltasam bench step: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    text = inspect.getdoc(StepOptions) or ""
    described = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE))
    hints = get_type_hints(StepOptions)
    parser = argparse.ArgumentParser(
        prog="python -m deltasam.lab.bench.step",
        description=text.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for each in fields(StepOptions):
        settings = {"default": each.default, "help": described[each.name], **_kind(hints[each.name])}
        parser.add_argument(f"--{each.name.replace('_', '-')}", **settings)
    return parser


def _kind(hint: Any) -> dict[str, Any]:
    """Returns the arguments with which argparse reads a value of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_kind(get_args(hint)[0])}
    optional = [kind for kind in get_args(hint) if kind is not type(None)]
    if optional:
        return _kind(optional[0])
    kind = hint
    return {"type": kind, "metavar": "FILE" if kind is Path else kind.__name__.upper()}


if __name__ == "__main__":
    sys.exit(main())
