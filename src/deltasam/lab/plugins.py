"""Plugins: modules of the user that register methods, weightings, regularisers and tasks.

They are listed in the variable ``DELTASAM_PLUGINS`` (modules or paths of ``.py`` files, separated by commas), or are
entry points of the group ``deltasam.plugins`` of installed packages. They are imported when a name is first looked up,
and add parts by :func:`deltasam.lab.experiments.register`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VARIABLE = "DELTASAM_PLUGINS"
GROUP = "deltasam.plugins"

_imported: list[str] = []


class PluginError(ValueError):
    """A plugin cannot be imported; the message names it, where it is listed, and the cause."""


def load_plugins() -> None:
    """Imports the plugins that have not been imported yet, those of the variable first.

    Raises:
        PluginError: One of them cannot be imported.
    """
    for plugin in named_plugins():
        what = f"{VARIABLE}: {_short_name(plugin)}"
        _load_once(plugin, what, "fix it, or remove it from the variable", partial(_load, plugin))
    for entry in _installed():
        what = f"{entry.value}, a plugin of the installed package {entry.dist.name if entry.dist else entry.name},"
        _load_once(f"{GROUP}: {entry.value}", what, "update or uninstall that package", entry.load)


def has_plugins() -> bool:
    """Whether any plugin is listed or installed. Imports none."""
    return bool(named_plugins() or _installed())


def named_plugins() -> list[str]:
    """Returns the plugins in the variable, with absolute paths."""
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return [str(Path(name).expanduser().resolve()) if _is_file(name) else name for name in names if name]


def loaded_plugins() -> list[str]:
    """Returns the imported plugins, without their folders."""
    return [_short_name(plugin) for plugin in _imported]


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py")


def _short_name(plugin: str) -> str:
    return Path(plugin).name if _is_file(plugin) else plugin.removeprefix(f"{GROUP}: ")


@cache
def _installed() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # lazy: it searches every installed package

    return tuple(entry_points(group=GROUP))


def _load_once(plugin: str, what: str, remedy: str, load: Callable[[], object]) -> None:
    if plugin in _imported:
        return
    _imported.append(plugin)  # before the import: a plugin may look up names
    try:
        load()
    except BaseException as error:
        _imported.remove(plugin)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(f"{what} cannot be imported ({_cause(plugin, error)}); {remedy}") from error


def _load(plugin: str) -> None:
    if not _is_file(plugin):
        import_module(plugin)
        return
    path = Path(plugin)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    # Unique, and the same in every process: classes are pickled by it.
    name = f"deltasam_plugin_{path.stem}_{hashlib.sha256(plugin.encode()).hexdigest()[:8]}"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _cause(plugin: str, error: BaseException) -> str:
    """Returns the error in one line, with the line of the plugin that raised it."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{plugin}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing}: install it, add its folder to PYTHONPATH, or give the path of a .py file"
        )
    message = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
    internal = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(internal)]
    own = [f for f in frames if f.filename == frames[0].filename]  # not inside libraries that it calls
    return f"{cause}, {Path(own[-1].filename).name} line {own[-1].lineno}" if own else cause
