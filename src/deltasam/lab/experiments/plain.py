"""Plain data (what YAML holds) and the typed, frozen records of a run: reading, merging, converting both ways.

One rule covers methods, tasks, weightings and the sections of a run: a record is a mapping of its fields, with a
``name`` where there is a choice of classes. Unknown keys and wrong types raise errors that name the key and the value.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltasam.lab.experiments._errors import ConfigError
from deltasam.step.names import method_key, normalized, suggest

Plain = dict[str, Any]


def read_yaml(path: Path) -> Plain:
    """Reads the mapping in a YAML file; anything else, and a repeated key, raises a ConfigError."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not text, or an invalid date
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{path}: not YAML ({str(error).splitlines()[0]}{line})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a mapping such as `name: value`, not {reprlib.repr(found)}")
    return found


class _DuplicateKeyError(Exception):
    """A mapping repeats a key."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that it rejects duplicate keys instead of silently using the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value != "<<" and isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _DuplicateKeyError(f"duplicate key {key.value!r} in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return node


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """Merges two configurations section by section; ``over`` wins.

    A part chosen by name (task, method, ...) keeps its options as long as the name stays the same; another name
    replaces it. A bare name is the same as a mapping with that name alone.

    Example:
        >>> merge({"method": {"name": "SAM", "rho": 0.1}}, {"method": {"rho": 0.2}})
        {'method': {'name': 'SAM', 'rho': 0.2}}
        >>> merge({"method": {"name": "SAM", "rho": 0.1}}, {"method": "delta-sam"})
        {'method': {'name': 'delta-sam'}}
    """
    merged = dict(base)
    for key, value in over.items():
        old, new = _as_mapping(key, merged.get(key)), _as_mapping(key, value)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and not _is_renamed(key, old, new):
            merged[key] = merge(old, new)
        else:
            merged[key] = new
    return merged


def _as_mapping(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in ("task", "method", "weighting"):
        return {"name": value}
    return {"path": value} if isinstance(value, str) and key == "model" else value


def _is_renamed(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    same = method_key if key == "method" else normalized
    return "name" in new and "name" in old and same(str(old["name"])) != same(str(new["name"]))


@functools.cache  # resolving the types costs more than reading a configuration
def option_types(kind: Any) -> Mapping[str, Any]:
    """Returns the type of every option of a dataclass by name."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if is_option(f)}


def is_option(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is part of the configuration, which the state of a method is not."""
    return field.init and field.compare


def options(kind: type, plain: Mapping[str, Any], where: str, leave_out: Iterable[str] = ()) -> Plain:
    """Converts each value to the type of its field of ``kind``; an unknown key or a wrong type is a ConfigError."""
    known = {name: hint for name, hint in option_types(kind).items() if name not in leave_out}
    prefix = f"{where}." if where else ""  # options of the run itself are in no section
    for key in plain:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: unknown option of {kind.__name__}; {suggest(str(key), known)}")
    return {key: _convert(known[key], value, f"{prefix}{key}") for key, value in plain.items()}


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Converts a value from YAML or a command line to a type (``1e-4`` is a string in YAML)."""
    from pydantic import ValidationError

    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
        return value  # built already
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = [value]  # a single column where a list is allowed
    if isinstance(value, bool) and hint in (int, float):
        raise ConfigError(f"{where}={value!r}: must be a number")
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        for key in error.errors()[0]["loc"]:  # the entry of a mapping that does not fit
            if isinstance(value, Mapping) and key in value:
                where, value = f"{where}.{key}", value[key]
        problems = dict.fromkeys(problem["msg"] for problem in error.errors())  # one for each type of a union
        raise ConfigError(f"{where}={value!r}: {'; or '.join(problems).replace('tuple', 'list')}") from error


@functools.cache  # making one takes longer than reading a whole configuration with it
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def section(kind: type, given: Any, where: str) -> Any:
    """Returns the dataclass ``kind`` from a mapping of its options; any mistake is a ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given!r}: must be a mapping of options, such as {where}.<option>=...")
    return build(kind, options(kind, given, where), where)


def build(kind: Any, given: Plain, where: str) -> Any:
    """Returns ``kind(**given)``; a missing option, and errors of the checks of ``kind``, become a ConfigError."""
    prefix = f"{where}: " if where else ""
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        needed = is_option(field) and field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in given:
            raise ConfigError(f"{prefix}`{field.name}` is missing")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{prefix}{error}") from error


def plain(record: Any) -> Any:
    """Returns a record as plain data with all its fields; :func:`options` is the inverse."""
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
    """Drops options that were added after runs got ids, as long as they do not change the result.

    A new option must not change the ids of all existing runs. Its field has ``metadata={"later": values}`` with the
    values that are left out of the id: the default, and earlier defaults. Values that were renamed count under the
    former name, ``metadata={"former": {name: former name}}``.
    """
    fields = dataclasses.fields(record)
    former = {f.name: f.metadata["former"] for f in fields if "former" in f.metadata}
    described = {
        name: former[name].get(value, value) if name in former else value for name, value in described.items()
    }
    same = {f.name for f in fields if getattr(record, f.name) in f.metadata.get("later", ())}
    return {name: value for name, value in described.items() if name not in same}
