"""``pip install deltasam`` with torch alone: the methods run, and the command names the extra to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.data import REPOSITORY
from helpers.empty_environment import build, environment, run

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns ``bin`` of an environment with torch, its dependencies, and the wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    return environment(folder / "venv", build("wheel", folder), ["torch"])


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
