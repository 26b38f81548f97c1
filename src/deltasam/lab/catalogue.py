"""The methods by name, for command lines and configuration files."""

from __future__ import annotations

import inspect

from deltasam import methods
from deltasam.lab.plugins import load_plugins
from deltasam.methods import Method
from deltasam.step.names import look_up, method_key, suggest

_FIRST = ("ERM", "SAM", "DeltaSAM")  # the order in tables: the baseline, the paper's methods, then the others

#: All methods by class name; plugins add theirs.
METHODS: dict[str, type[Method]] = {
    name: kind
    for name, kind in ((name, getattr(methods, name)) for name in dict.fromkeys((*_FIRST, *methods.__all__)))
    if inspect.isclass(kind) and issubclass(kind, Method) and not inspect.isabstract(kind)
}


def find_method(name: str) -> type[Method]:
    """Returns the class of a method by its name as people write it, see :func:`~deltasam.step.names.method_key`.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest one.
        PluginError: A plugin cannot be imported.

    Example:
        >>> find_method("delta-sam").__name__, find_method("per-instance").__name__
        ('DeltaSAM', 'PerInstanceSAM')
    """
    load_plugins()
    found = look_up(METHODS, name, method_key)
    if found is None:
        raise ValueError(f"{name!r} is not a method; {suggest(name, METHODS)}")
    return found
