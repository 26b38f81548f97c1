"""``pip install deltasam`` with torch alone: the methods run, and the command names the extra to install."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from helpers.data import REPOSITORY

EVERY_METHOD = """
import sys, torch
from torch import nn
import deltasam
from deltasam import methods

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(12, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        return self.head(self.words(input_ids).flatten(1))

torch.manual_seed(0)
model = Net()
batch = {"input_ids": torch.randint(11, (6, 3)), "labels": torch.randint(3, (6,))}
kinds = [getattr(methods, name) for name in methods.__all__]
kinds = [k for k in kinds if isinstance(k, type) and issubclass(k, methods.Method) and not k.__abstractmethods__]
for kind in kinds:
    method = kind(**({"params": "trained"} if kind.needs_adapters else {}))
    step = method.backward(model, batch, deltasam.Classification())
    assert step.losses.isfinite().all(), kind
    model.zero_grad()
for name in deltasam.__all__:
    getattr(deltasam, name)
import deltasam.analysis, deltasam.speed.capture, deltasam.speed.compiling, deltasam.integrations
print(len(kinds), *sorted({each.partition(".")[0] for each in sys.modules} & set(FORBIDDEN)))
"""
OF_THE_LAB = ("numpy", "pydantic", "tyro", "yaml", "rich", "transformers", "pandas", "scipy")


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns ``bin`` of an environment with torch, its dependencies, and the wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    for path in needed("torch", set()):
        (site / path.name).symlink_to(path)
    binaries = folder / "venv" / "bin"
    install = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--no-deps", str(next(folder.glob("*.whl")))], check=True, capture_output=True)
    return binaries


def run(*command: object) -> subprocess.CompletedProcess[str]:
    # -I excludes this process's environment variables and folder from the import path
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd="/")


def test_every_method_runs(alone: Path) -> None:
    done = run(alone / "python", "-I", "-c", f"FORBIDDEN = {OF_THE_LAB[1:]!r}\n{EVERY_METHOD}")
    assert done.returncode == 0, done.stderr
    count, *loaded = done.stdout.split()
    assert int(count) >= 13
    assert not loaded


def test_the_example_plain_loop_runs(alone: Path) -> None:
    done = run(alone / "python", "-I", REPOSITORY / "examples" / "plain_loop.py", "--seeds", 1, "--epochs", 1)
    assert done.returncode == 0, done.stderr


def test_the_command_names_its_extra(alone: Path) -> None:
    for command in ([alone / "deltasam", "train"], [alone / "python", "-I", "-m", "deltasam"]):
        done = run(*command)
        assert done.returncode == 1
        assert 'pip install "deltasam[lab]"' in done.stderr
        assert "Traceback" not in done.stderr


def test_the_wheel_contains_the_presets(alone: Path) -> None:
    site = next(alone.parent.glob("lib/python*/site-packages/deltasam"))
    assert (site / "configs").is_dir()
    assert (site / "py.typed").is_file()
