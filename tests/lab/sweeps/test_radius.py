"""The search for a radius: its runs, and the rule that chooses."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, stdev
from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError, RunConfig
from deltasam.lab.sweeps import PLAIN, choose_radius, final_runs, radius_sweep


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_plain({"task": "rte", "model": "minilm-l6", "method": "SAM", **changes})


def test_the_runs_differ_in_radius_and_seed_alone() -> None:
    base = config(
        method={"name": "PerInstanceSAM", "group": 2, "rho": {"name": "LossShare"}},
        regularisers=[{"name": "RDrop"}], optimizer={"lr": 3e-4}, seed=7,
    )  # fmt: skip
    runs = final_runs(radius_sweep(base, [0.02, 0.01], seeds=3, holdout=0.2), {})
    assert [(run.method, run.config.seed) for run in runs] == [
        *itertools.product([PLAIN, "rho=0.01", "rho=0.02"], (7, 8, 9))
    ]
    expected = base.to_plain()
    expected["task"] |= {"train_split": "train[:80%]", "eval_split": "train[80%:]"}
    for run in runs:
        rho = {"rho=0.01": 0.01, "rho=0.02": 0.02}.get(run.method)
        method = config(method="ERM").to_plain()["method"] if rho is None else {**expected["method"], "rho": rho}
        assert run.config.to_plain() == {**expected, "method": method, "seed": run.config.seed}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"method": "ERM"}, {}, "ERM has no radius rho to search"),
        ({}, {"radii": []}, r"radii=\[\]"),
        ({}, {"radii": [0.1, 0.1]}, "several different ones"),
        ({}, {"radii": [0.0]}, "radii=0.0"),
        ({}, {"radii": [-0.1]}, "radii=-0.1"),
        ({}, {"seeds": 0}, "seeds=0"),
        ({}, {"holdout": 0.0}, "holdout=0: must be a whole number of percent"),
        ({}, {"holdout": 0.125}, "holdout=0.125"),
        ({}, {"holdout": math.nan}, "holdout=nan"),
        ({"task": {"name": "rte", "train_split": "train[:50%]"}}, {}, r"train_split=train\[:50%\]: is a part already"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        radius_sweep(config(**changes), **{"radii": [0.01], **options})


def test_the_smallest_radius_within_one_standard_error() -> None:
    scores = {0.0: [80.0, 80.5, 81.0], 0.01: [81.0, 82.0, 83.2], 0.02: [81.5, 82.5, 83.5], 0.05: [70.0, 72.0, 71.0]}
    error = stdev(scores[0.02]) / math.sqrt(3)
    assert fmean(scores[0.02]) - error < fmean(scores[0.01]) < fmean(scores[0.02])
    choice = choose_radius(scores)
    assert (choice.rho, choice.best, choice.seeds, choice.resamples) == (0.01, 0.02, 3, 27)
    # The slow, obvious count.
    plain = others = 0
    for drawn in itertools.product(range(3), repeat=3):
        means = {rho: sum(values[k] for k in drawn) for rho, values in scores.items()}
        plain += means[0.01] > means[0.0] + 1e-9
        others += all(means[0.01] > mean + 1e-9 for rho, mean in means.items() if rho != 0.01)
    assert choice.beats_plain == pytest.approx(plain / 27)
    assert choice.beats_others == pytest.approx(others / 27)
    below = {**scores, 0.01: [81.0 - 0.4, 82.0 - 0.4, 83.2 - 0.4]}  # more than one standard error below
    assert choose_radius(below).rho == 0.02
    losses = {rho: [-value for value in values] for rho, values in scores.items()}
    assert choose_radius(losses, higher_is_better=False) == choice
    assert choose_radius(losses).rho == 0.05


def test_plain_training_is_chosen_only_if_it_is_best() -> None:
    choice = choose_radius({0.0: [80.0, 82.0], 0.01: [79.9, 82.0], 0.02: [70.0, 71.0]})
    assert (choice.rho, choice.best, choice.beats_plain, choice.beats_others) == (0.0, 0.0, None, 0.75)
    assert choose_radius({0.0: [80.0, 82.0], 0.01: [80.1, 82.0]}).rho == 0.01  # within one error, but not best
    assert choose_radius({0.0: [80.0], 0.01: [80.0]}).rho == 0.0  # a tie is no reason to pay for a perturbation


def test_plain_training_between_a_radius_and_the_best_one() -> None:
    # The rule is about radii: plain training is near the best, too, and the share of resamples shows it.
    choice = choose_radius({0.0: [80.0, 84.0], 0.01: [70.0, 71.0], 0.02: [81.0, 84.0]})
    assert (choice.rho, choice.beats_plain) == (0.02, 0.75)


def test_one_seed_says_nothing_about_the_spread_and_many_are_drawn() -> None:
    choice = choose_radius({0.0: [80.0], 0.01: [81.0], 0.02: [82.0]})
    assert (choice.rho, choice.resamples, choice.beats_plain, choice.beats_others) == (0.02, 0, None, None)
    many = choose_radius({0.0: [float(k) for k in range(8)], 0.01: [k + 0.1 for k in range(8)]})
    assert (many.rho, many.resamples, many.beats_plain, many.beats_others) == (0.01, 20_000, 1.0, 1.0)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({0.01: [1.0]}, "must have plain training"),
        ({0.0: [1.0]}, "at least one radius"),
        ({0.0: [1.0, 2.0], 0.01: [1.0]}, "one score per seed"),
        ({0.0: [1.0], 0.01: [math.nan]}, "leave out radii that diverged"),
    ],
)
def test_scores_that_cannot_be_compared(scores: dict[float, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_radius(scores)
