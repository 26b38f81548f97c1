"""A task without download: does this one-line description belong to this function?

The pairs come from the sources of Python's standard library, which are parsed, not imported.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deltasam.lab.tasks._data import DataError, Row, Split
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._tables import whole

# Tests, bundled tools and installed packages.
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
_SENTENCE = re.compile(r"^(.*?[.!?])(?:\s|$)")
_SPLITS = {"train": range(80), "validation": range(80, 100)}


@dataclass(frozen=True, kw_only=True)
class DocstringTask(SentenceTask):
    """Pairs (qualified name of a function, first sentence of its docstring) from the standard library.

    Half of the functions keep their description (label 1), the others get that of another function of the same module
    and split (label 0). A hash of the name decides the label and the split, so that the task is the same everywhere
    for one version of Python.

    Example:
        >>> task = DocstringTask(name="docstrings")
        >>> rows = task.load(DataSource()).splits["validation"]
        >>> sorted(rows[0]), {row["label"] for row in rows} == {0, 1}
        (['label', 'sentence1', 'sentence2'], True)
    """

    text: tuple[str, ...] = ("sentence1", "sentence2")
    classes: tuple[str, ...] = ("mismatch", "match")
    metrics: tuple[str, ...] = ("accuracy", "f1")
    max_length: int = 64
    label_noise: float = 0.0  # without "later": it is older here than elsewhere, and part of the ids of runs

    @property
    def data_note(self) -> str:
        """The source of the data, for ``deltasam list tasks``."""
        return "Python's standard library, no download"

    def read(self, source: DataSource, split: str) -> Split:
        """Returns the rows of ``train`` (80%) or ``validation`` (20%), or of a part."""
        if whole(split) != split:
            return super().read(source, split)
        if split not in _SPLITS:
            raise DataError(f"docstrings: there is no split {split!r}, only {', '.join(_SPLITS)}")
        rows = [dict(row) for row in _pairs() if _hash(row["sentence1"], "split") % 100 in _SPLITS[split]]
        return Split(rows, f"docstrings of the standard library, {split}")


@lru_cache(maxsize=1)
def _pairs() -> tuple[Row, ...]:
    groups: dict[tuple[str, bool], list[tuple[str, str]]] = defaultdict(list)
    for module, name, description in harvest(Path(sysconfig.get_paths()["stdlib"])):
        held_out = _hash(name, "split") % 100 in _SPLITS["validation"]
        groups[module, held_out].append((name, description))
    rows = []
    for functions in groups.values():
        # In the order of a hash, the next function with another description is a pseudo-random one.
        functions.sort(key=lambda function: _hash(function[0], "order"))
        for index, (name, description) in enumerate(functions):
            others = (other for _, other in functions[index + 1 :] + functions[:index] if other != description)
            wrong = next(others, None)
            if wrong is None:  # alone in its module: it would always be a match
                continue
            label = _hash(name, "label") % 2
            rows.append({"sentence1": name, "sentence2": description if label else wrong, "label": label})
    if not rows:
        raise DataError("docstrings: the sources of the standard library are not installed with this Python")
    return tuple(sorted(rows, key=lambda row: str(row["sentence1"])))


def harvest(root: Path, packages: Collection[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Yields module, qualified name and first sentence of public functions with a description of 3 to 40 words.

    Args:
        root: The folder of the library.
        packages: Only these of it; all by default.
    """
    for path in sorted(_sources(root, packages)):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        seen = set()
        for name, docstring in _documented(ast.parse(path.read_bytes()), module):
            sentence = _first_sentence(docstring)
            if name not in seen and 3 <= len(sentence.split()) <= 40:
                seen.add(name)
                yield module, name, sentence


def _sources(root: Path, packages: Collection[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        wanted = packages if folder == str(root) else ()
        folders[:] = [name for name in folders if _is_wanted(name, wanted)]  # the others are not entered
        yield from (Path(folder, name) for name in files if name.endswith(".py") and _is_wanted(name[:-3], wanted))


def _is_wanted(name: str, packages: Collection[str]) -> bool:
    return name not in _EXCLUDED and not name.startswith("__p") and (not packages or name in packages)


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, f"{prefix}.{child.name}")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            docstring = ast.get_docstring(child)
            if docstring:
                yield f"{prefix}.{child.name}", docstring


def split_of(name: str) -> str:
    """Returns the split of a function: ``train`` or ``validation``, by a hash of its name."""
    return next(split for split, part in _SPLITS.items() if _hash(name, "split") % 100 in part)


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    found = _SENTENCE.match(paragraph)
    return found.group(1) if found else paragraph


def _hash(name: str, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8], "big")
