"""The search for a radius: trainings with several radii on a part of the training set, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltasam.lab.experiments import ConfigError, RunConfig
from deltasam.lab.sweeps._file import Sweep
from deltasam.step.checks import check_number

PLAIN = "plain"
_ENUMERATED = 6  # up to 6 seeds, all n^n resamples are taken (46,656); beyond that they are drawn
_RESAMPLES = 20_000


def radius_sweep(config: RunConfig, radii: Sequence[float], *, seeds: int = 2, holdout: float = 0.1) -> Sweep:
    """Returns the trainings of a search: plain training and each radius, evaluated on the end of the training split.

    Args:
        config: The run. Its seed is the first of the seeds.
        radii: Values of the method's ``rho``.
        seeds: Number of seeds.
        holdout: Share of the training split that is not trained on.

    Returns:
        The sweep. Its methods are :data:`PLAIN`, and ``rho=...`` for each radius.

    Raises:
        ConfigError: The method has no radius, or an argument cannot be used.

    Example:
        >>> config = RunConfig.from_plain({"task": "mrpc", "model": "minilm-l6", "method": "SAM"})
        >>> sweep = radius_sweep(config, [0.01, 0.02])
        >>> list(sweep.methods), sweep.seeds, sweep.tasks[0]["eval_split"]
        (['plain', 'rho=0.01', 'rho=0.02'], (42, 43), 'train[90%:]')
    """
    sections = config.to_plain()
    task, model, method, first = (sections.pop(name) for name in ("task", "model", "method", "seed"))
    if "rho" not in method:
        raise ConfigError(f"{method['name']} has no radius rho to search; choose another method, such as --method sam")
    if not radii or len(set(radii)) != len(radii):
        raise ConfigError(f"radii={list(radii)}: must be one number or several different ones")
    try:
        for rho in radii:
            check_number("radii", rho, 0, open_low=True)
        check_number("seeds", seeds, 1, whole=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    percent = round(100 * holdout) if math.isfinite(holdout) else 0
    if not 1 <= percent <= 90 or not math.isclose(percent, 100 * holdout, rel_tol=1e-6):
        raise ConfigError(f"holdout={holdout:g}: must be a whole number of percent, from 0.01 to 0.9")
    split = task["train_split"]
    if "[" in split:
        raise ConfigError(
            f"task.train_split={split}: is a part already, and the search trains on a part of it; set a whole split"
        )
    task |= {"train_split": f"{split}[:{100 - percent}%]", "eval_split": f"{split}[{100 - percent}%:]"}
    methods: dict[str, dict[str, Any]] = {PLAIN: {"method": "ERM"}}
    methods |= {f"rho={rho:g}": {"method": {**method, "rho": float(rho)}} for rho in sorted(radii)}
    return Sweep(
        name="radius",
        tasks=(task,),
        models=(model,),
        methods=methods,
        common=sections,
        seeds=tuple(range(first, first + seeds)),
        keep="results",
    )


@dataclass(frozen=True, kw_only=True)
class RadiusChoice:
    """The chosen radius, and how sure the choice is.

    Attributes:
        rho: The radius; 0 if plain training has the best mean.
        best: The radius with the best mean.
        seeds: Number of seeds.
        resamples: Number of bootstrap resamples of the seeds; 0 for one seed, which says nothing about the spread.
        beats_plain: Share of the resamples in which the choice has a better mean than plain training; None if the
            choice is plain training, or with one seed.
        beats_others: Share of the resamples in which it has a better mean than all others, plain training included;
            None with one seed.
    """

    rho: float
    best: float
    seeds: int
    resamples: int
    beats_plain: float | None
    beats_others: float | None


def choose_radius(scores: Mapping[float, Sequence[float]], *, higher_is_better: bool = True) -> RadiusChoice:
    """Chooses the smallest radius whose mean is within one standard error of the best one.

    The standard error is that of the mean of the best radius over the seeds. If plain training has the best mean, it
    is chosen. The resamples draw seeds, the same for all radii, since the scores of one seed belong together. They say
    nothing about another evaluation set.

    Args:
        scores: Scores of each radius, one per seed, in the same order. 0 is plain training.
        higher_is_better: Whether higher scores are better.

    Raises:
        ValueError: There is no plain training or no radius, or scores are missing or not finite.

    Example:
        >>> choice = choose_radius({0.0: [80.0, 81.0], 0.01: [82.0, 83.0], 0.02: [82.3, 82.9]})
        >>> choice.rho, choice.best, choice.beats_plain, choice.resamples
        (0.01, 0.02, 1.0, 4)
    """
    if 0.0 not in scores or len(scores) < 2:
        raise ValueError(f"scores of {sorted(scores)}: must have plain training (0) and at least one radius")
    radii = sorted(scores)
    if len({len(scores[rho]) for rho in radii}) != 1 or not len(scores[0.0]):
        raise ValueError(f"scores={dict(scores)}: every radius must have one score per seed")
    table = np.array([scores[rho] for rho in radii], dtype=np.float64) * (1 if higher_is_better else -1)
    if not np.isfinite(table).all():
        raise ValueError(f"scores={dict(scores)}: must be finite; leave out radii that diverged")
    means, seeds = table.mean(axis=1), table.shape[1]
    slack = 1e-12 * float(np.abs(table).max())  # the same scores summed in another order
    best = int(np.argmax(means >= means.max() - slack))
    error = float(table[best].std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else 0.0
    near = [k for k in range(1, len(radii)) if means[k] >= means[best] - error - slack]
    chosen = 0 if best == 0 else near[0]
    if seeds == 1:
        return RadiusChoice(
            rho=radii[chosen], best=radii[best], seeds=1, resamples=0, beats_plain=None, beats_others=None
        )
    drawn = table[:, _resamples(seeds)].mean(axis=2)
    others = np.delete(drawn, chosen, axis=0).max(axis=0)
    return RadiusChoice(
        rho=radii[chosen],
        best=radii[best],
        seeds=seeds,
        resamples=drawn.shape[1],
        beats_plain=float((drawn[chosen] > drawn[0] + slack).mean()) if chosen else None,
        beats_others=float((drawn[chosen] > others + slack).mean()),
    )


def _resamples(seeds: int) -> np.ndarray:
    """Indices of resampled seeds, shape (resamples, seeds)."""
    if seeds <= _ENUMERATED:
        return np.stack(np.meshgrid(*[np.arange(seeds)] * seeds, indexing="ij"), axis=-1).reshape(-1, seeds)
    return np.random.default_rng(0).integers(seeds, size=(_RESAMPLES, seeds))
