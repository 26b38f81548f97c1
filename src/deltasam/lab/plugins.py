"""Modules of the user's own that add to what is chosen by name: methods, weightings, regularisers, tasks.

They are named in the variable ``DELTASAM_PLUGINS`` (modules or paths of ``.py`` files, with commas between them), or
are entry points of the group ``deltasam.plugins`` of installed packages. Nothing else is imported, and nothing before
a name is looked up. What they add they say by :func:`deltasam.lab.experiments.register`.
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
    """A plugin cannot be imported; the message says which one, who named it, and why."""


def load_plugins() -> None:
    """Imports the plugins that were not imported yet, those of the variable first.

    Raises:
        PluginError: One of them cannot be imported.
    """
    for plugin in named_plugins():
        told = f"{VARIABLE}: {_shown(plugin)}"
        _once(plugin, told, "mend it, or take it out of the variable", partial(_load, plugin))
    for entry in _installed():
        told = f"{entry.value}, a plugin of the installed package {entry.dist.name if entry.dist else entry.name},"
        _once(f"{GROUP}: {entry.value}", told, "update or uninstall that package", entry.load)


def named_plugins() -> list[str]:
    """What the variable names, with whole paths, which mean the same in every folder."""
    words = (word.strip() for word in os.environ.get(VARIABLE, "").split(","))
    return [str(Path(word).expanduser().resolve()) if _is_file(word) else word for word in words if word]


def loaded_plugins() -> list[str]:
    """The plugins that were imported, without their folders."""
    return [_shown(plugin) for plugin in _imported]


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py")


def _shown(plugin: str) -> str:
    return Path(plugin).name if _is_file(plugin) else plugin.removeprefix(f"{GROUP}: ")


@cache
def _installed() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # a look at every installed package: not before it is needed

    return tuple(entry_points(group=GROUP))


def _once(plugin: str, what: str, way_out: str, load: Callable[[], object]) -> None:
    if plugin in _imported:
        return
    _imported.append(plugin)  # before the import: a plugin may look up names itself
    try:
        load()
    except BaseException as error:
        _imported.remove(plugin)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(f"{what} cannot be imported ({_cause(plugin, error)}); {way_out}") from error


def _load(plugin: str) -> None:
    if not _is_file(plugin):
        import_module(plugin)
        return
    path = Path(plugin)
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    # A name that no module has, the same in every process: classes are pickled by it.
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
    """The error in one line, with the line of the plugin that it came from."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{plugin}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing}: install it, put its folder into PYTHONPATH, or name the file by a path "
            "that ends in .py"
        )
    said = " ".join(str(error).split())
    told = f"{type(error).__name__}: {said}" if said else type(error).__name__
    on_the_way = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(on_the_way)]
    own = [f for f in frames if f.filename == frames[0].filename]  # not the depths of a library that it called
    return f"{told}, {Path(own[-1].filename).name} line {own[-1].lineno}" if own else told
