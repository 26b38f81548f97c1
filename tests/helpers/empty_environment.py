"""Environments that hold the wheel of this repository and only what it declares, made without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from helpers.data import REPOSITORY


def build(kind: str, folder: Path) -> Path:
    """Builds the ``wheel`` or the ``sdist`` with the installed backend. Returns the file."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def environment(folder: Path, wheel: Path, names: Iterable[str]) -> Path:
    """Makes an environment with the wheel, these distributions and what they need. Returns its ``bin``.

    The distributions are links to the installed ones: torch alone would take a minute to copy.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    found: set[str] = set()
    for path in (path for name in names for path in needed(name, found)):
        if not (site / path.name).exists():  # distributions share namespaces such as google
            (site / path.name).symlink_to(path)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def needed(name: str, found: set[str]) -> Iterator[Path]:
    """Yields the top-level entries in site-packages of a distribution and of its dependencies."""
    if name in found:
        return
    found.add(name)
    try:
        installed = distribution(name)
    except PackageNotFoundError:  # only for another system or version of Python
        return
    tops = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
    yield from (Path(str(installed.locate_file(top))) for top in sorted(tops))
    for requirement in installed.requires or ():
        if "extra ==" not in requirement:
            yield from needed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], found)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the repository. Use ``python -I``, which ignores the variables of this process."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd="/")
