"""Which of the evaluations of a run is its result, and which its best."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltasam.lab.experiments._run import _result
from deltasam.lab.tasks import Measured


@pytest.mark.parametrize(("higher", "best", "step"), [(True, 0.9, 2), (False, 0.1, 1)])
def test_the_last_evaluation_counts_and_the_best_is_recorded(higher: bool, best: float, step: int) -> None:
    task = SimpleNamespace(name="own", primary="score", higher_is_better=higher, eval_split="validation")
    config = SimpleNamespace(
        task=task, run_id="x", model=SimpleNamespace(path="m"), method=None, arm=("ERM",), seed=1, to_plain=dict
    )
    prepared: Any = SimpleNamespace(
        config=config, train_rows=[1, 2, 3], eval_rows=[1, 2], data=SimpleNamespace(origins={})
    )
    scores = (0.1, 0.9, float("nan"), 0.5)
    log = [{"eval_score": score, "step": number + 1} for number, score in enumerate(scores)]
    trainer = SimpleNamespace(
        state=SimpleNamespace(log_history=[*log, {"loss": 1.0, "step": 4}], global_step=4),
        model=SimpleNamespace(parameters=list), forwards=8, backwards=4, method=SimpleNamespace(skipped=0),
        captured=SimpleNamespace(report=SimpleNamespace(replayed=3)),
    )  # fmt: skip
    found = _result(prepared, trainer, {}, 2.0, 1.0, Measured({"forgetting": 0.5}))
    assert (found.primary_value, found.metrics) == (0.5, {"score": 0.5, "forgetting": 0.5})
    assert (found.best_value, found.best_step) == (best, step)
    assert (found.train_seconds, found.eval_seconds, found.train_rows, found.eval_rows) == (2.0, 1.0, 3, 2)
    assert (found.forward_passes, found.backward_passes, found.captured_steps) == (8, 4, 3)
