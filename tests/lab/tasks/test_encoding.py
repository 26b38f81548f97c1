"""Rows that are evaluated again are tokenized once, as long as they cannot change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltasam.lab.experiments import RunConfig, run
from deltasam.lab.tasks import DocstringPromptTask, SentenceTask, tokenizing_once
from deltasam.lab.tasks._encoding import once
from helpers.pretrained import bert_folder, llama_folder


def letters(rows: Any, tokenizer: Any) -> list[str]:
    return [f"{tokenizer}:{row}" for row in rows]


def test_the_same_objects_are_tokenized_once_and_only_inside() -> None:
    rows, equal = ["a", "b"], ["a", "b"]
    with tokenizing_once():
        first = once(letters, rows, "one")  # type: ignore[arg-type]
        with tokenizing_once():
            assert once(letters, rows, "one") is first  # type: ignore[arg-type]
        assert once(letters, rows, "one") is first  # type: ignore[arg-type]
        assert once(letters, equal, "one") is not first  # type: ignore[arg-type]
        assert once(letters, rows, "other") == ["other:a", "other:b"]  # type: ignore[arg-type]
    rows.append("c")
    assert once(letters, rows, "one")[-1] == "one:c"  # type: ignore[arg-type]
    with tokenizing_once():
        assert once(letters, rows, "one")[-1] == "one:c"  # type: ignore[arg-type]


def counted(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[int]:
    """Counts the calls of a method, by the number of rows."""
    calls: list[int] = []
    inner: Callable[..., Any] = getattr(kind, name)

    def counting(self: Any, rows: Any, tokenizer: Any, **options: Any) -> Any:
        calls.append(len(rows))
        return inner(self, rows, tokenizer, **options)

    monkeypatch.setattr(kind, name, counting)
    return calls


CASES: dict[str, tuple[str, type, str]] = {
    "texts": ("docstrings", SentenceTask, "encode"),
    "prompts": ("docstrings-prompt", DocstringPromptTask, "_prompts"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_tokenizes_its_evaluation_rows_once(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, kind, name = CASES[case]
    folder = bert_folder(tmp_path / "model") if case == "texts" else llama_folder(tmp_path / "model")
    config = RunConfig.from_plain(
        {
            "task": {"name": task, "train_rows": 24, "eval_rows": 10, "max_length": 24},
            "model": str(folder),
            "schedule": {"epochs": 2},
            "batch": {"size": 8},
            "evaluate_every": "epoch",
        }
    )
    calls = counted(monkeypatch, kind, name)
    result = run(config, tmp_path / "run")
    assert calls.count(10) == 1
    assert {"accuracy_8bit", "accuracy_3bit"} <= set(result.metrics)
