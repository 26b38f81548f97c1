"""Adaptive search over the settings of a run: Optuna proposes points; a file or a database stores the study."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from deltasam.lab.experiments import ConfigError, DivergedError, RunConfig, resolve, run
from deltasam.lab.experiments.plain import build, merge, options, read_yaml
from deltasam.lab.sweeps._file import check_seeds
from deltasam.lab.sweeps._plan import with_setting

_IDENTITY = "search"  # the attribute of a study that identifies its search


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search over settings of a run.

    Attributes:
        name: Name of the study: that of its file, without the suffix.
        preset: Preset of the run, or None.
        common: Sections merged into it.
        space: The settings: a list of choices, or ``{low, high}`` with ``log: true`` for a logarithmic scale.
        seeds: Seeds of every trial; the value of a trial is the mean of the primary metric.
        trials: Total number of trials, including those of other processes on the same storage.
    """

    name: str
    preset: str | None = None
    common: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any]
    seeds: tuple[int, ...] = (1,)
    trials: int = 20

    def __post_init__(self) -> None:
        if not self.space or not self.seeds or self.trials < 1:
            raise ValueError("space, seeds and trials must not be empty or 0")
        check_seeds({"common": self.common, "space": self.space})
        for setting, choices in self.space.items():
            if isinstance(choices, Mapping) and {"low", "high"} <= set(choices) <= {"low", "high", "log"}:
                _check_range(f"space.{setting}={dict(choices)}", choices)
            elif not isinstance(choices, list) or not choices:
                raise ValueError(f"space.{setting}={choices!r} must be a list, or have low, high and perhaps log")

    @property
    def identity(self) -> str:
        """A hash of the search; the number of trials is not part of it."""
        parts = [self.preset, self.common, self.space, list(self.seeds)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def config(self, point: Mapping[str, Any], seed: int) -> RunConfig:
        """Returns the run at a point of the space."""
        base = resolve(preset=self.preset).to_plain() if self.preset is not None else {}
        sections = RunConfig.from_plain(merge(base, self.common)).to_plain()
        for setting, value in point.items():
            sections = with_setting(sections, setting, value)
        return RunConfig.from_plain({**sections, "seed": seed})


def read_search(path: Path) -> Search:
    """Reads a search from a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a search.
    """
    found: Search = build(
        Search, {"name": path.stem, **options(Search, read_yaml(path), str(path), ("name",))}, str(path)
    )
    return found


def run_search(
    search: Search,
    folder: Path,
    *,
    storage: str | None = None,
    watch: Callable[[Any, Any], None] | None = None,
    step: Callable[[int, int, dict[str, float]], None] | None = None,
) -> Any:
    """Runs the missing trials and returns the study. A stopped search resumes when it is started again.

    A trial that diverges has no value: Optuna counts it as pruned, worse than all others.

    Args:
        search: The search.
        folder: Parent of the run folders and of the file of the study.
        storage: URL of a database, for several machines; by default a file in the folder.
        watch: Called by Optuna after every trial with the study and the trial.
        step: Called after every update of a run, see :func:`~deltasam.lab.experiments.run`.

    Returns:
        The :class:`optuna.Study`.

    Raises:
        ConfigError: Optuna is missing, the storage cannot be used, or the configuration is wrong.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise ConfigError("a search needs Optuna: pip install 'deltasam[search]'") from error
    first = _check_space(search)
    whole = {name for name, choices in search.space.items() if _is_integer(search, name, choices)}
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it logs tracebacks of errors that are raised anyway
    journal = folder / "study.journal"
    where = str(journal) if storage is None else f"--storage {storage}"
    if storage is None:
        _repair(journal)
    try:
        study = optuna.create_study(
            study_name=search.name,
            storage=storage or JournalStorage(JournalFileBackend(str(journal))),
            direction="maximize" if first.task.higher_is_better else "minimize",
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, ValueError) as error:  # no such database, or no driver for it
        raise ConfigError(f"{where}: cannot be used ({str(error).splitlines()[0]})") from error
    _check_study(study, search, where)

    def value(trial: Any) -> float:
        point = {name: _suggest(trial, name, choices, whole=name in whole) for name, choices in search.space.items()}
        configs = [search.config(point, seed) for seed in search.seeds]
        try:
            mean = fmean(run(config, folder / config.run_name, watch=step).score for config in configs)
        except DivergedError as error:
            raise optuna.TrialPruned(str(error)) from error
        if not math.isfinite(mean):
            raise optuna.TrialPruned("a metric is not finite")
        return mean

    done = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
    study.optimize(value, n_trials=max(0, search.trials - done), callbacks=[watch] if watch is not None else None)
    return study


def _repair(journal: Path) -> None:
    """Removes an incomplete last line of a killed process; the next line would be appended to it."""
    from optuna.storages.journal import JournalFileSymlinkLock

    if not journal.is_file() or journal.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock = JournalFileSymlinkLock(str(journal))  # the lock that every program that uses Optuna takes to write
    lock.acquire()
    try:
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _check_study(study: Any, search: Search, where: str) -> None:
    """Raises a ConfigError if the study of this name belongs to another search."""
    known = study.user_attrs.get(_IDENTITY)
    if known is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_IDENTITY, search.identity)
    elif known not in (None, search.identity):  # None: made by an older version
        raise ConfigError(
            f"{where}: the study {search.name!r} belongs to another search (other preset, common, space or seeds); "
            "rename the file of this one, or choose another folder by --output"
        )


def _check_range(where: str, choices: Mapping[str, Any]) -> None:
    try:
        low, high = float(choices["low"]), float(choices["high"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: low and high must be numbers") from error
    if not low < high:
        raise ValueError(f"{where}: low must be less than high")
    if choices.get("log") and not low > 0:
        raise ValueError(f"{where}: log needs low above 0")


def _check_space(search: Search) -> RunConfig:
    """Checks every choice and both ends of every range before the first trial; returns the run at the first point."""
    ends = {name: _ends(choices) for name, choices in search.space.items()}
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        for value in values:
            try:
                search.config({**first, name: value}, search.seeds[0])
            except ConfigError as error:  # noqa: PERF203 - raised once
                raise ConfigError(f"space.{name}, {value!r}: {error}") from error
    return search.config(first, search.seeds[0])


def _ends(choices: Any) -> list[Any]:
    """Returns all choices, or both ends of a range; 100.0, and 1e2, which YAML reads as text, become integers."""
    if isinstance(choices, list):
        return choices
    low, high = float(choices["low"]), float(choices["high"])
    return [int(end) if end.is_integer() else end for end in (low, high)]


def _is_integer(search: Search, name: str, choices: Any) -> bool:
    """Whether the values of a range are integers: its ends are, and the setting rejects fractions."""
    if isinstance(choices, list) or not all(isinstance(end, int) for end in _ends(choices)):
        return False
    first = {other: _ends(its)[0] for other, its in search.space.items()}
    try:
        search.config({**first, name: _ends(choices)[0] + 0.5}, search.seeds[0])
    except ConfigError:
        return True
    return False


def _suggest(trial: Any, name: str, choices: Any, *, whole: bool) -> Any:
    if isinstance(choices, list):
        return trial.suggest_categorical(name, choices)
    low, high = _ends(choices)
    log = bool(choices.get("log", False))
    if whole:
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, float(low), float(high), log=log)
