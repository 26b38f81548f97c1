"""Adaptive search over the settings of a run: Optuna proposes, a run answers, a file or a database state_keys."""

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

from deltasam.lab.experiments._components import build, options
from deltasam.lab.experiments._config import RunConfig, read_yaml
from deltasam.lab.experiments._errors import ConfigError, DivergedError
from deltasam.lab.experiments._resolve import merge, resolve
from deltasam.lab.experiments._run import run
from deltasam.lab.sweeps._file import check_seeds
from deltasam.lab.sweeps._plan import with_setting

_IDENTITY = "search"  # the attribute of a study that says which search it is of


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search: a run, and the settings of it that are looked for.

    Attributes:
        name: Name of the study: of its file, without the ending.
        preset: Preset the run starts from, or None.
        common: Sections laid over it.
        space: The settings: a list of choices, or ``{low, high}`` with ``log: true`` for a logarithmic scale.
        seeds: Seeds of every trial; the value of a trial is the mean of the primary metric.
        trials: Trials in all, those of other processes on the same storage included.
    """

    name: str
    preset: str | None = None
    common: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any]
    seeds: tuple[int, ...] = (1,)
    trials: int = 20

    def __post_init__(self) -> None:
        """Checks what the types do not say."""
        if not self.space or not self.seeds or self.trials < 1:
            raise ValueError("space, seeds and trials must each hold at least one")
        check_seeds({"common": self.common, "space": self.space})
        for setting, choices in self.space.items():
            if isinstance(choices, Mapping) and {"low", "high"} <= set(choices) <= {"low", "high", "log"}:
                _check_range(f"space.{setting}={dict(choices)}", choices)
            elif not isinstance(choices, list) or not choices:
                raise ValueError(f"space.{setting}={choices!r} must be a list, or have low, high and perhaps log")

    @property
    def identity(self) -> str:
        """A hash of what is searched where; more trials are the same search."""
        parts = [self.preset, self.common, self.space, list(self.seeds)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def config(self, point: Mapping[str, Any], seed: int) -> RunConfig:
        """The run at a point of the space."""
        base = resolve(preset=self.preset).to_plain() if self.preset is not None else {}
        sections = RunConfig.from_plain(merge(base, self.common)).to_plain()
        for setting, value in point.items():
            sections = with_setting(sections, setting, value)
        return RunConfig.from_plain({**sections, "seed": seed})


def read_search(path: Path) -> Search:
    """The search in a YAML file.

    Raises:
        ConfigError: The file cannot be read or is no search.
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
    """Runs the trials that are missing, and gives the study. Stopped and started again it goes on.

    A trial that diverges has no value: Optuna counts it as pruned, worse than all others.

    Args:
        search: The search.
        folder: Where the run folders are made, and the file of the study.
        storage: URL of a database, for many machines; a file in the folder by default.
        watch: Called by Optuna after every trial with the study and the trial.
        step: Called after every update of a run, see :func:`~deltasam.lab.experiments.run`.

    Returns:
        The :class:`optuna.Study`.

    Raises:
        ConfigError: Optuna is missing, the storage cannot be used, or the search describes no run.
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
    whole = {name for name, choices in search.space.items() if _is_whole(search, name, choices)}
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns with a traceback of what is raised anyway
    if storage is None:
        _mend(folder / "study.journal")
    try:
        study = optuna.create_study(
            study_name=search.name,
            storage=storage or JournalStorage(JournalFileBackend(str(folder / "study.journal"))),
            direction="maximize" if first.task.higher_is_better else "minimize",
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, ValueError) as error:  # no such database, or no driver for it
        where = f"{folder / 'study.journal'}" if storage is None else f"--storage {storage}"
        raise ConfigError(f"{where}: cannot be used ({str(error).splitlines()[0]})") from error

    _check_study(study, search, folder, storage)

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


def _mend(journal: Path) -> None:
    """Cuts off what a killed process has left of a line: the next one would be joined to it, and neither be read."""
    from optuna.storages.journal import JournalFileSymlinkLock

    if not journal.is_file() or journal.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock = JournalFileSymlinkLock(str(journal))  # the one that Optuna takes to write
    lock.acquire()
    try:
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)
    finally:
        lock.release()


def _check_study(study: Any, search: Search, folder: Path, storage: str | None) -> None:
    """Trials of another search with the same name are no trials of this one.

    Raises:
        ConfigError: The study there is of another search.
    """
    own = search.identity
    known = study.user_attrs.get(_IDENTITY)
    if known is None and not study.get_trials(deepcopy=False):
        study.set_user_attr(_IDENTITY, own)
    elif known not in (None, own):  # None: made before this was noted
        where = folder / "study.journal" if storage is None else f"--storage {storage}"
        raise ConfigError(
            f"{where}: the study {search.name!r} there is of another search (its preset, common, space or seeds "
            "differ); rename the file of this one, or choose another folder by --output"
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
    """The run at the first point of the space, after a look at every choice and both ends of every range.

    Raises:
        ConfigError: One of them is no setting of the run; hours into the search it would end it.
    """
    ends = {name: _ends(choices) for name, choices in search.space.items()}
    first = {name: values[0] for name, values in ends.items()}
    for name, value in ((name, value) for name, values in ends.items() for value in values):
        _check_point(search, {**first, name: value}, f"space.{name}, {value!r}")
    return search.config(first, search.seeds[0])


def _check_point(search: Search, point: Mapping[str, Any], where: str) -> None:
    try:
        search.config(point, search.seeds[0])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _ends(choices: Any) -> list[Any]:
    """All choices, or both ends of a range."""
    return choices if isinstance(choices, list) else [_end(choices["low"]), _end(choices["high"])]


def _end(value: Any) -> int | float:
    """The number, whole where it can be: 100.0, and 1e2, which YAML takes for text, are ends of whole numbers, too."""
    number = float(value)
    return int(number) if number.is_integer() else number


def _is_whole(search: Search, name: str, choices: Any) -> bool:
    """Whether the values of a range are whole numbers: its ends are, and the setting takes no fraction."""
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
