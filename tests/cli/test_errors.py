"""What a command's mistakes and interruptions look like from outside."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from deltasam.cli import CommandError, main
from deltasam.cli._commands import COMMANDS, Command


@dataclass(frozen=True, kw_only=True)
class Failing:
    """Raises what it is told to."""

    how: str = "user"

    def run(self) -> int:
        if self.how == "user":
            raise CommandError("no run in 'runs/x'; make one with `deltasam train`")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        raise RuntimeError("a bug")


@pytest.fixture(autouse=True)
def _failing_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "load", lambda _: Failing)
    monkeypatch.setitem(COMMANDS, "fail", Command("not:imported", "fails"))


def test_a_mistake_of_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail"]) == 1
    assert capsys.readouterr().err == "deltasam fail: no run in 'runs/x'; make one with `deltasam train`\n"


def test_an_interruption_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "--how", "interrupt"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["fail", "--how", "bug"])
