"""Names, costs and first lines of the classes of a package, read from its sources.

Importing the methods takes seconds, because they import torch; a list of them needs none of it.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

METHODS = ("deltasam.methods", "Method", ("ERM", "SAM", "DeltaSAM"))
"""Package, base class and the names that come first, for :func:`classes_in`."""
REGULARISERS = ("deltasam.objectives.regularisers", "Wrapper", ())


def classes_in(package: str, base: str, first: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """Returns cost and first line of the file of every exported class of a package that derives from ``base``.

    Classes without a cost are bases of others and left out.

    Args:
        package: The package. Its ``__init__`` imports the classes from modules and lists them in ``__all__``.
        base: Name of the base class, which is in the package.
        first: Names that come first; the others follow in the order of ``__all__``.

    Example:
        >>> classes_in(*METHODS)["SAM"][0]
        '2/2'
    """
    modules = _imported_from(package)
    exported = next(
        ast.literal_eval(node.value)
        for node in _tree(package).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    found = {}
    for name in dict.fromkeys((*first, *exported)):
        if name != base and (cost := _cost(modules.get(name, ""), name, base)):
            found[name] = cost, (ast.get_docstring(_tree(modules[name])) or "").partition("\n")[0]
    return found


def _cost(module: str, name: str, base: str) -> str:
    """The class attribute ``cost``, also if it is inherited; empty for what is not derived from ``base``."""
    if not module.startswith("deltasam"):
        return ""
    kind = next((node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if kind is None:
        return ""
    own = [node for node in kind.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and _target(node) == "cost"]
    modules = _imported_from(module)
    parents = [_text(parent) for parent in kind.bases]
    inherited = [_cost(modules.get(parent, module), parent, base) for parent in parents]
    derived = name == base or any(_derives(modules.get(parent, module), parent, base) for parent in parents)
    if own and own[0].value is not None and derived:
        return str(ast.literal_eval(own[0].value))
    return next(filter(None, inherited), "")


def _derives(module: str, name: str, base: str) -> bool:
    if name == base or not module.startswith("deltasam"):
        return name == base
    kinds = [node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name]
    modules = _imported_from(module)
    return any(_derives(modules.get(_text(up), module), _text(up), base) for kind in kinds for up in kind.bases)


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return str(getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", ""))


def _text(node: ast.expr) -> str:
    return ast.unparse(node).partition("[")[0]


def _imported_from(module: str) -> dict[str, str]:
    """The module that each name of a module is imported from."""
    nodes = (node for node in _tree(module).body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.asname or alias.name: str(node.module) for node in nodes for alias in node.names}


@cache
def _tree(module: str) -> ast.Module:
    root = find_spec("deltasam")  # finding a module inside of a package would import the package
    assert root is not None
    assert root.submodule_search_locations
    path = Path(root.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
