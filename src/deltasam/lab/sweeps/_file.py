"""The sweep file: setups x methods x grid x seeds, in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltasam.lab.experiments import ConfigError, Keep
from deltasam.lab.experiments.plain import Plain, build, options, read_yaml, section
from deltasam.step.checks import check_number
from deltasam.step.names import suggest

_ALL = "all"  # the name of "checkpoints" in version 0.1


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Choice of a point of the grid: the best mean over these seeds; all seeds of the sweep are then run at it.

    Attributes:
        seeds: Seeds of every point.
        common: Sections merged into the tuning runs only, such as another evaluation split.
    """

    seeds: tuple[int, ...]
    common: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds=[] must name at least one seed")
        _check_different("seeds", self.seeds)


@dataclass(frozen=True, kw_only=True)
class Risk:
    """Options of the adversarial risk measured after each final run: the arguments of ``record_risk``.

    Attributes:
        rho: Radius.
        rows: Size of a fixed random sample of the split.
        steps: Ascent steps inside the ball.
        batch_size: Instances per batch.
        split: The split; by default the one that the run evaluates on.
    """

    rho: float = 0.05
    rows: int = 256
    steps: int = 1
    batch_size: int = 16
    split: str | None = None

    def __post_init__(self) -> None:
        """Checks the options; otherwise a mistake would show only after the first training."""
        check_number("rho", self.rho, 0, open_low=True)
        for name in ("rows", "steps", "batch_size"):
            check_number(name, getattr(self, name), 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many runs, described by one file.

    Attributes:
        name: Name of the sweep: that of its file, without the suffix.
        presets: Setups by the name of their preset.
        tasks: Further setups: every task with every model.
        models: The models for ``tasks``.
        methods: The sections of each method by its label; empty for the preset's variant of that name.
        common: Sections merged into every run.
        grid: The settings to vary for each method, such as ``method.rho``, with their values.
        seeds: Seeds of the runs that are reported.
        tune: How a point of the grid is chosen; None runs every point with every seed.
        risk: Options of the adversarial risk to measure after each final run, see :class:`Risk`, or None.
        keep: What is kept of a finished run: ``results``, ``weights``, or ``checkpoints``, which includes the others.
    """

    name: str
    presets: tuple[str, ...] = ()
    tasks: tuple[Any, ...] = ()
    models: tuple[Any, ...] = ()
    methods: dict[str, dict[str, Any]]
    common: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (42,)
    tune: Tune | None = None
    risk: dict[str, Any] | None = None
    keep: Keep = "weights"

    def __post_init__(self) -> None:
        if bool(self.tasks) != bool(self.models):
            raise ValueError("tasks and models go together: every task is run with every model")
        if not (self.presets or self.tasks):
            raise ValueError("there is no setup; add presets, or tasks and models")
        if not self.methods or not self.seeds:
            raise ValueError("methods and seeds must each name at least one")
        for name in ("seeds", "presets", "tasks", "models"):
            _check_different(name, getattr(self, name))
        tuning = {} if self.tune is None else self.tune.common
        parts = {"common": self.common, "tune.common": tuning}
        parts |= {f"methods.{label}": sections for label, sections in self.methods.items()}
        check_seeds(parts | {f"grid.{label}": settings for label, settings in self.grid.items()})
        for label, settings in self.grid.items():
            if label not in self.methods:
                raise ValueError(f"grid.{label}: not a method of the sweep; {suggest(label, self.methods)}")
            for setting, values in settings.items():
                if not values:
                    raise ValueError(f"grid.{label}.{setting}=[] must name at least one value")
                _check_different(f"grid.{label}.{setting}", values)

    @classmethod
    def from_plain(cls, given: Mapping[str, Any], name: str) -> Sweep:
        """Builds the sweep from plain data, as read from YAML.

        Raises:
            ConfigError: A key is unknown or a value is wrong.
        """
        found: Plain = dict(given)
        if found.get("keep") == _ALL:
            found["keep"] = "checkpoints"
        methods = found.get("methods") or {}
        found["methods"] = {str(m): {} for m in methods} if isinstance(methods, list) else _sections(methods)
        if found.get("tune") is not None:
            found["tune"] = section(Tune, found["tune"], "tune")
        if found.get("risk") is not None:
            checked = section(Risk, found["risk"], "risk")
            found["risk"] = {name: getattr(checked, name) for name in found["risk"]}
        made: Sweep = build(cls, {"name": name, **options(cls, found, "sweep", leave_out=("name",))}, "sweep")
        return made


def _check_different(name: str, values: Sequence[Any]) -> None:
    """Raises a ValueError for duplicates, which would count twice in means and in the choice of a point."""
    read: list[Any] = []
    for value in values:
        number = value
        with suppress(TypeError, ValueError):
            number = float(value)  # YAML reads 1e-2 as text, but it is the same setting as 0.01
        if number in read:
            raise ValueError(f"{name}={list(values)} must not contain duplicates")
        read.append(number)


def check_seeds(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises a ValueError for a seed in a section: the seeds of runs are set by ``seeds``."""
    for where, given in parts.items():
        if "seed" in given:
            raise ValueError(f"{where}.seed has no effect; set the seeds of all runs by seeds: [1, 2]")


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep from a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a sweep.
    """
    given = read_yaml(path)
    try:
        return Sweep.from_plain(given, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _sections(methods: Any) -> dict[str, Any]:
    if not isinstance(methods, Mapping):
        raise ConfigError(f"methods={methods!r}: must be a list of names, or a mapping of labels to sections")
    for label, it in methods.items():
        if not isinstance(it, (str, Mapping, type(None))):
            raise ConfigError(f"methods.{label}={it!r}: must be the name of a method, or a mapping of sections")
    return {str(label): {"method": it} if isinstance(it, str) else dict(it or {}) for label, it in methods.items()}
