"""Exit codes and messages of errors and interruptions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from deltasam.lab.cli import CommandError, main
from deltasam.lab.cli._commands import COMMANDS, Command


@dataclass(frozen=True, kw_only=True)
class Failing:
    """Raises the error of its option."""

    how: str = "user"

    def run(self) -> int:
        if self.how == "user":
            raise CommandError("no run in 'runs/x'; make one with `deltasam train`")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "forbidden":
            raise PermissionError(13, "Permission denied", "runs/x")
        if self.how == "full":
            raise OSError(28, "No space left on device")
        if self.how == "bug":
            raise RuntimeError("a bug")
        raise ModuleNotFoundError(name=self.how)


@pytest.fixture(autouse=True)
def _failing_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "load", lambda _: Failing)
    monkeypatch.setitem(COMMANDS, "fail", Command("not:imported", "fails"))


def test_an_error_of_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail"]) == 1
    assert capsys.readouterr().err == "deltasam fail: no run in 'runs/x'; make one with `deltasam train`\n"


def test_an_interruption_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "--how", "interrupt"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_interruption_while_the_command_is_being_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltasam.lab.cli._main._run", interrupted)
    assert main(["fail"]) == 130
    assert capsys.readouterr().err == "deltasam fail: interrupted\n"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("forbidden", "runs/x: Permission denied; check its permissions, or choose another place"),
        ("full", "No space left on device; free some space, or choose another place"),
        ("optuna", "needs optuna, which is not installed: pip install 'deltasam[search]'"),
        ("ray.exceptions", "needs ray, which is not installed: pip install 'deltasam[cluster]'"),
        ("sklearn.metrics", "needs sklearn, which is not installed: pip install 'deltasam[lab]'"),
    ],
)
def test_an_error_of_the_system_is_one_line(how: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "--how", how]) == 1
    assert capsys.readouterr().err == f"deltasam fail: {message}\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["fail", "--how", "bug"])
