"""The methods by name, for command lines and configuration files."""

from __future__ import annotations

import inspect

from deltasam import methods
from deltasam.lab.plugins import load_plugins
from deltasam.methods import Method
from deltasam.step.names import look_up, suggest

_FIRST = ("ERM", "SAM", "DeltaSAM")  # the order of tables: what all are compared with, the paper's, then the others

#: Every method of the package, by class name; those of the user join when their modules are imported.
METHODS: dict[str, type[Method]] = {
    name: kind
    for name, kind in ((name, getattr(methods, name)) for name in dict.fromkeys((*_FIRST, *methods.__all__)))
    if inspect.isclass(kind) and issubclass(kind, Method) and not inspect.isabstract(kind)
}


def find_method(name: str) -> type[Method]:
    """The method of this name, however it is spelled: ``DeltaSAM``, ``delta-sam``, ``delta_sam``.

    Raises:
        ValueError: There is none; the message names the nearest one.
        PluginError: A module of the user's own cannot be imported.

    Example:
        >>> find_method("delta-sam").__name__
        'DeltaSAM'
    """
    load_plugins()
    found = look_up(METHODS, name)
    if found is None:
        raise ValueError(f"{name!r} is not a method; {suggest(name, METHODS)}")
    return found
