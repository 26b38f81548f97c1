"""The answers on the front page of the results: one comparison for each question, its effect and a verdict.

The comparisons were fixed here before their results were seen, except those whose runs are older: accuracy of small
encoders, adversarial risk and sentence similarity. The verdict follows from the permutation test over the seeds within
each setup, after Holm's correction over all questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deltasam.lab.pages import base as base_size
from deltasam.lab.pages import calibration, directions, llm, rounding, runs, shift, stress
from deltasam.lab.pages.effects import Groups, counted, shown
from deltasam.lab.pages.evidence import arm_name, paired
from deltasam.lab.pages.runs import by_metric, scores, trained
from deltasam.lab.pages.selections import FIRST_ALL, SECOND_ALL
from deltasam.lab.pages.statistics import difference, series
from deltasam.lab.report import Comparison, holm, pooled_test
from deltasam.step.names import pluralized

LEVEL = 0.05
UNMEASURED = "not measured yet"


@dataclass(frozen=True)
class Question:
    """A comparison.

    Attributes:
        groups: Makes the differences by setup, from the folder of the results.
        better: 1 if a positive difference means yes, -1 if a negative one does.
    """

    groups: Callable[[Path], Groups]
    better: int = 1


def against_plain(frame: pd.DataFrame, method: str, metric: str, **settings: float | str) -> Groups:
    """The differences of a metric between a method, at some settings, and plain training."""
    own = frame[frame["method"] == method]
    for name, value in settings.items():
        own = own[own[name] == value]
    return paired(own, frame[frame["method"] == "ERM"], metric)


def columns(frame: pd.DataFrame, first: str, second: str) -> Groups:
    """The differences between two rows of a long frame, by column."""
    cells = series(frame)
    return {name: found for name in frame["column"].unique() if (found := difference(cells, first, second, name))}


def glue(results: Path, first: str, second: str) -> Groups:
    """The differences on the GLUE tasks of both encoders; the runs of the pooled table."""
    return columns(scores(results, *FIRST_ALL, *SECOND_ALL), first, second)


def risk(results: Path, first: str, second: str) -> Groups:
    """The differences in adversarial risk, at rho = 0.05 for all."""
    frames = {task: series(runs.risk(results, task)) for task in ("mrpc", "rte")}
    return {task: found for task, cells in frames.items() if (found := difference(cells, first, second, "L_adv"))}


def own_direction(results: Path, other: str) -> Groups:
    """The differences in NLL between per-instance perturbation and another method at the same radius."""
    frame = directions.runs(results)
    return paired(frame[frame["arm"] == directions.own(frame)], frame[frame["kind"] == arm_name(other)], "nll")


_FROZEN: dict[str, float | str] = {"params": "base", "rho": 0.005}
QUESTIONS: dict[str, Question] = {
    "accuracy_sam": Question(lambda r: glue(r, "SAM", "ERM")),
    "accuracy_delta": Question(lambda r: glue(r, "DeltaSAM", "SAM")),
    "accuracy_instance": Question(lambda r: glue(r, "PerInstanceSAM", "SAM")),
    "accuracy_rdrop": Question(lambda r: glue(r, "ERM+RDrop", "ERM")),
    "sts_delta": Question(lambda r: columns(by_metric(trained(r, "sts")[0], {"score": "average"}), "DeltaSAM", "SAM")),
    "risk_sam": Question(lambda r: risk(r, "SAM", "ERM"), -1),
    "risk_instance": Question(lambda r: risk(r, "PerInstanceSAM", "SAM"), -1),
    "ece_sam": Question(lambda r: against_plain(calibration.runs(r), "SAM", "ece", rho=0.01), -1),
    "nll_sam": Question(lambda r: against_plain(calibration.runs(r), "SAM", "nll", rho=0.01), -1),
    "nll_scaled_sam": Question(lambda r: against_plain(calibration.runs(r), "SAM", "nll_scaled", rho=0.01), -1),
    "bits_sam": Question(lambda r: against_plain(rounding.runs(r), "SAM", "drop_4bit", rho=0.01), -1),
    "noise_sam": Question(lambda r: against_plain(stress.at(r, "noise", 0.2), "SAM", "score", rho=0.01)),
    "noise_instance": Question(
        lambda r: against_plain(stress.at(r, "noise", 0.2), "PerInstanceSAM", "score", rho=0.005)
    ),
    "rows_sam": Question(lambda r: against_plain(stress.at(r, "rows", 250), "SAM", "score", rho=0.01)),
    "shift_sam": Question(lambda r: against_plain(shift.runs(r), "SAM", "score_shifted")),
    "base_sam": Question(lambda r: against_plain(base_size.runs(r), "SAM", "score")),
    "llm_metric": Question(lambda r: against_plain(llm.runs(r, "LoRA"), "PerInstanceSAM", "score", **_FROZEN)),
    "llm_forgetting": Question(
        lambda r: against_plain(llm.runs(r, "LoRA"), "PerInstanceSAM", "forgetting", **_FROZEN), -1
    ),
    "llm_bits": Question(lambda r: against_plain(llm.runs(r, "LoRA"), "PerInstanceSAM", "score_4bit", **_FROZEN)),
    "own_random": Question(lambda r: own_direction(r, "RandomPerturbation"), -1),
    "own_batch": Question(lambda r: own_direction(r, "SAM"), -1),
}


def answers(results: Path, questions: dict[str, Question] = QUESTIONS) -> str:
    """Name of a question -> verdict, effect with its interval, p; as JSON, which the pages insert by name."""
    found = {name: counted(question.groups(results)) for name, question in questions.items()}
    tests = {name: _test(groups) for name, groups in found.items() if groups}
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    texts = {}
    for name, question in questions.items():
        if name not in tests:
            texts[name] = UNMEASURED
            continue
        p, effect, count = adjusted[name], shown(found[name]), pluralized(len(found[name]), "setup")
        expected = tests[name].difference * question.better > 0
        verdict = "not shown" if p > LEVEL else "yes" if expected else "no, the opposite"
        texts[name] = f"**{verdict}**: {effect}, {count}, p = {p:.2g}"
    return json.dumps(texts, indent=2, ensure_ascii=False)


def _test(groups: Groups) -> Comparison:
    return pooled_test({setup: (list(values), [0.0] * len(values)) for setup, values in groups.items()})
