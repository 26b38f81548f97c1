"""Combines a preset, a file, options and settings into one configuration; later ones win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deltasam.lab.experiments._config import RunConfig
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments._learning_rate import with_learning_rate
from deltasam.lab.experiments._presets import load_preset, preset_names
from deltasam.lab.experiments.plain import Plain, merge, read_yaml
from deltasam.lab.tasks import TASKS


def resolve(
    *,
    preset: str | None = None,
    file: Path | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    note: Callable[[str], object] = lambda text: None,
) -> RunConfig:
    """Returns the configuration of a run. A learning rate that is not named is chosen by the size of the model.

    Args:
        preset: Name of a preset; with ``method``, its variant for that method if it has one.
        file: A YAML file with any part of a configuration.
        method: Name of the method.
        options: Sections by name; None values are ignored.
        settings: ``section.option=value``, the value in YAML.
        note: Called with a sentence about the learning rate, if it was chosen.

    Returns:
        The configuration.

    Raises:
        ConfigError: Something is unknown, wrong or missing.
        PluginError: A module in ``DELTASAM_PLUGINS`` cannot be imported.

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
        found = merge(found, _parse_setting(setting))
    return RunConfig.from_plain(with_learning_rate(found, note))


def _meant(word: str) -> str:
    """The option for the name of a preset or of a task."""
    option = "--preset" if word in preset_names() else "--task" if word in TASKS else ""
    return f"; did you mean {option} {word}?" if option else ""


def _parse_setting(setting: str) -> Plain:
    """Parses ``task.text=[title, body]`` to ``{"task": {"text": ["title", "body"]}}``."""
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise ConfigError(
            f"{setting!r}: a setting has the form section.option=value, such as method.rho=0.02{_meant(setting)}"
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting!r}: the value is not YAML ({str(error).splitlines()[0]})") from error
    for part in reversed(path.lstrip("-").split(".")):
        value = {part: value}
    return dict(value)
