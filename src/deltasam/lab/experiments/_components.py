"""Plain data (what YAML holds) to typed, frozen records and back: methods, tasks, weightings, sections of a run.

One rule serves all of them: a record is a mapping of its fields, with a ``name`` where there is a choice of classes.
Unknown keys and wrong types are errors that name the key, the value and the way out.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from deltasam.lab.experiments._errors import ConfigError
from deltasam.step.names import look_up, suggest

Plain = dict[str, Any]


def choose(kinds: Mapping[str, Any], name: Any, where: str) -> Any:
    """The entry of this name, however it is spelled.

    Raises:
        ConfigError: There is none; the message names the nearest one.
    """
    found = look_up(kinds, str(name))
    if found is None:
        raise ConfigError(f"{where}: there is no {name!r}; {suggest(str(name), kinds)}")
    return found


def options(kind: type, plain: Mapping[str, Any], where: str, leave_out: Iterable[str] = ()) -> Plain:
    """The fields of the dataclass ``kind`` that ``plain`` gives, each converted to the field's type.

    Raises:
        ConfigError: A key is no field, or a value has the wrong type.
    """
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind) if is_option(field)}
    known = {name: hint for name, hint in known.items() if name not in set(leave_out)}
    for key in plain:
        if key not in known:
            raise ConfigError(f"{_path(where, key)}: unknown option of {kind.__name__}; {suggest(str(key), known)}")
    return {key: convert(known[key], value, _path(where, key)) for key, value in plain.items()}


def is_option(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is part of the configuration, which the state of a method is not."""
    return field.init and field.compare


def _path(where: str, key: str) -> str:
    """The option as a setting names it; those of the run itself stand in no section."""
    return f"{where}.{key}" if where else key


def convert(hint: Any, value: Any, where: str) -> Any:
    """A value of the type, from what YAML or a command line gave (``1e-4`` is a string to YAML).

    Raises:
        ConfigError: The value does not fit.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
        return value  # built already
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = [value]  # one column where there may be several
    if isinstance(value, bool) and hint in (int, float):
        raise ConfigError(f"{where}={value!r}: must be a number")
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        problems = {problem["type"]: problem["msg"] for problem in reversed(error.errors())}
        said = problems.get("literal_error", error.errors()[0]["msg"]).replace("valid tuple", "valid list")
        said = said.replace("Field required", "an entry is missing")
        said = said.replace("valid dictionary", f"mapping, as by {where}.<key>=...")
        or_number = ", or a whole number" if "literal_error" in problems and "int_parsing" in problems else ""
        quote = "; YAML takes no, yes and 2024 for other things than text: quote them"
        raise ConfigError(f"{where}={value!r}: {said}{or_number}{quote * _unquoted(value, said)}") from error


def _unquoted(value: Any, said: str) -> bool:
    """Whether it was to be text, and YAML has made something else of it."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return said.endswith("valid string") and any(isinstance(part, (bool, int, float)) for part in parts)


def build(kind: Any, given: Plain, where: str) -> Any:
    """``kind(**given)`` with its own checks told as errors of the configuration.

    Raises:
        ConfigError: The record refuses its values, or lacks one.
    """
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    needed = (f.name for f in fields if is_option(f) and f.default is f.default_factory is dataclasses.MISSING)
    missing = next((name for name in needed if name not in given), None)
    if missing is not None:
        raise ConfigError(f"{where}: `{missing}` is missing" if where else f"`{missing}` is missing")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def plain(record: Any) -> Any:
    """A record as plain data, all fields included; what :func:`options` takes back.

    Raises:
        ConfigError: A field holds something that cannot be written to a file, such as a function.
    """
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: plain(getattr(record, f.name)) for f in dataclasses.fields(record) if is_option(f)}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(value) for value in record]
    if record is None or isinstance(record, (bool, int, float, str)):
        return record
    raise ConfigError(f"{record!r} cannot be written to a configuration file; use a name, a number or a list of these")


def without_later(record: Any, described: Plain) -> Plain:
    """``described`` without the options that came after runs were first numbered, while they change nothing.

    A new option must not make another run of every run there is; its field says ``metadata={"later": values}`` with
    the values that do not count: the default, and earlier ones.
    """
    fields = dataclasses.fields(record)
    same = {f.name for f in fields if getattr(record, f.name) in f.metadata.get("later", ())}
    return {name: value for name, value in described.items() if name not in same}
