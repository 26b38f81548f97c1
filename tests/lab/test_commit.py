"""The commit that is written beside numbers: the environment's word, git's, or none."""

from __future__ import annotations

import subprocess

import pytest

from deltasam.lab import commit as module
from helpers.data import REPOSITORY


def test_the_commit_of_the_environment_or_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_head", lambda: "abc with uncommitted changes")
    monkeypatch.setenv("DELTASAM_COMMIT", "def")
    found = [module.commit.__wrapped__()]
    monkeypatch.delenv("DELTASAM_COMMIT")
    found.append(module.commit.__wrapped__())
    monkeypatch.setattr(module, "_head", lambda: None)
    found.append(module.commit.__wrapped__())
    assert found == ["def", "abc with uncommitted changes", None]


def test_the_head_of_this_checkout() -> None:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        pytest.skip("not a git checkout")
    assert (module._head() or "").startswith(told.stdout.strip())
