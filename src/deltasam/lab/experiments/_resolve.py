"""From a preset, a file, options and settings to one configuration; what comes later wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deltasam.lab.experiments._components import Plain
from deltasam.lab.experiments._config import RunConfig, read_yaml
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._presets import load_preset
from deltasam.step.names import spelled


def resolve(
    *,
    preset: str | None = None,
    file: Path | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> RunConfig:
    """The configuration of a run.

    Args:
        preset: Name of a preset; with ``method``, its variant for that method if it has one.
        file: A YAML file with any part of a configuration.
        method: Name of the method.
        options: Sections by name; those that are None are not given.
        settings: ``section.option=value``, the value in YAML.

    Returns:
        The configuration.

    Raises:
        ConfigError: Something is unknown, wrong or missing.
        PluginError: A module that ``DELTASAM_PLUGINS`` names cannot be imported.

    Example:
        >>> config = resolve(options={"task": "rte", "model": "minilm-l6"}, method="sam", settings=["method.rho=0.02"])
        >>> config.method.rho
        0.02
    """
    found: Plain = {}
    if preset is not None:
        found, has_variant = load_preset(preset, method)
        method = None if has_variant else method
    if file is not None:
        found = merge(found, read_yaml(file))
    for name, value in (options or {}).items():
        if value is not None:
            found = merge(found, {name: value})
    if method is not None:
        found = merge(found, {"method": method})
    for setting in settings:
        found = merge(found, parse_setting(setting))
    return RunConfig.from_plain(found)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Plain:
    """``over`` laid over ``base``, section by section.

    A part chosen by name (task, method, ...) keeps its options as long as the name stays the same; another name starts
    afresh. A bare name is the same as a mapping with that name alone.

    Example:
        >>> merge({"method": {"name": "SAM", "rho": 0.1}}, {"method": {"rho": 0.2}})
        {'method': {'name': 'SAM', 'rho': 0.2}}
        >>> merge({"method": {"name": "SAM", "rho": 0.1}}, {"method": "delta-sam"})
        {'method': {'name': 'delta-sam'}}
    """
    merged = dict(base)
    for key, value in over.items():
        old, new = _opened(key, merged.get(key)), _opened(key, value)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and not _renamed(old, new):
            merged[key] = merge(old, new)
        else:
            merged[key] = new
    return merged


def parse_setting(setting: str) -> Plain:
    """``method.rho=0.02`` as nested mappings.

    Raises:
        ConfigError: There is no ``=``, or the value is not YAML.

    Example:
        >>> parse_setting("task.text=[title, body]")
        {'task': {'text': ['title', 'body']}}
    """
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise ConfigError(f"{setting!r}: a setting has the form section.option=value, such as method.rho=0.02")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting!r}: the value is not YAML ({str(error).splitlines()[0]})") from error
    for part in reversed(path.lstrip("-").split(".")):
        value = {part: value}
    return dict(value)


def _opened(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in ("task", "method", "weighting"):
        return {"name": value}
    return {"path": value} if isinstance(value, str) and key == "model" else value


def _renamed(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "name" in new and "name" in old and spelled(str(old["name"])) != spelled(str(new["name"]))
