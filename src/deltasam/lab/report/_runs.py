"""Reads run folders into small records, without torch: ten thousand folders in a few seconds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import Any

from deltasam.lab.report._conditions import Conditions, conditions_of
from deltasam.lab.report._evaluation import Evaluation
from deltasam.lab.report._general_text import ORIGIN, on_another_text, without_text
from deltasam.lab.report._measured import FORMS, RISK, is_number, read_measurement
from deltasam.step.names import pluralized

_NOT_RUNS = {"model", "checkpoints", "logs", "locks", "tensorboard", "analysis"}
_RUN_FILES = {"config.yaml", "result.json"}
# Copies of constants of `deltasam.lab.experiments`, which imports torch; tests compare them. Runs that differ only in
# these options, or in the seed, are repetitions. `_LATER` holds options that older runs lack, with their old values.
_NOT_VARIANT = ("seed", "data", "checkpoint_every", "capture", "on_out_of_memory", "workers")
_LATER = {"PerInstanceSAM": {"factors": ("auto", "exact"), "at_once": (None,), "max_extra_memory": (None,)}}
_MAIN = {"LossBudget": "sigma", "LossShare": "share", "Relative": "r", "Layerwise": "rho"}  # of rules for the radius
_SCHEMA = 1

Bins = tuple[tuple[float, float, float], ...]
"""Count, mean confidence and accuracy of each bin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What tables and figures need from one finished run."""

    path: Path  #: Run folder.
    run_id: str  #: Hash of the configuration.
    task: str  #: Name of the task.
    model: str  #: Path of the model; :func:`short_models` makes names to display.
    #: Method, regularisers, average, joined by ``+``; in parentheses weights that are not the paper's, rules of radii.
    method: str
    seed: int  #: Seed.
    variant: int  #: Hash of the configuration without the seed. Runs of one variant are repetitions.
    evaluation: Evaluation  #: How the metrics were computed.
    settings: tuple[tuple[str, float], ...]  #: Hyperparameters: ``lr``, ``rho``, ``eta``, ``scale``, ...
    radius: str  #: Radius of the perturbation, or its rule; empty if the method has none.
    conditions: Conditions  #: Everything else that can change the weights, except the seed.
    data: tuple[str, ...]  #: How the training data were altered, such as ``20% label noise``.
    primary: str  #: Name of the primary metric.
    higher_is_better: bool  #: Whether a larger primary metric is better.
    best: float  #: Best value of the primary metric among the evaluations.
    metrics: Mapping[str, float]  #: Metrics of the final weights.
    reliability: Mapping[str, Bins]  #: Bins of confidence by evaluation: ``evaluation``, ``scaled``, ``on_qqp``.
    steps: int  #: Updates.
    train_seconds: float  #: Training time.
    forwards: int  #: Forward passes.
    backwards: int  #: Backward passes.
    memory: int  #: Peak memory in bytes.
    device: str  #: Device.
    captured: bool  #: Whether steps were replayed as CUDA graphs.
    general: str = ""  #: The text on which forgetting was measured.

    @property
    def score(self) -> float:
        """Primary metric of the final weights."""
        return self.metrics[self.primary]

    @property
    def step_seconds(self) -> float:
        """Training time per update."""
        return self.train_seconds / self.steps

    @property
    def train_rows(self) -> str:
        """Number of training rows; empty where it was not recorded."""
        return dict(self.conditions).get("training rows", "")

    def result(self) -> dict[str, Any]:
        """Returns the content of ``result.json``."""
        return dict(json.loads((self.path / "result.json").read_bytes()))

    def risk(self) -> dict[str, Any] | None:
        """Returns the adversarial risk with its settings, or None where there is none."""
        found = self.measured(RISK)
        return None if found is None else {"settings": {}, **found}

    def measured(self, name: str) -> dict[str, Any] | None:
        """Returns a measurement in the folder, or None where it is missing, truncated or altered."""
        return read_measurement(self.path / "analysis" / name)

    def log(self) -> list[dict[str, float]]:
        """Returns the numbers in ``metrics.jsonl``, one entry per logged step; empty if there is no such file."""
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError, AttributeError):  # the last line of a run that was killed, or a damaged one
                found.append({name: value for name, value in json.loads(line).items() if is_number(value)})
        return [entry for entry in found if "step" in entry]


@dataclass(frozen=True)
class Runs:
    """All runs below some folders."""

    finished: list[Run]  #: Finished runs, sorted by path.
    unfinished: list[Path] = field(default_factory=list)  #: Run folders without a result.
    failed: list[Path] = field(default_factory=list)  #: Traceback files of failed runs of sweeps.
    unreadable: dict[Path, str] = field(default_factory=dict)  #: Results that cannot be read, with the reason.
    diverged: list[Path] = field(default_factory=list)  #: Runs with a metric that is not finite.
    other_text: list[Path] = field(default_factory=list)  #: Runs without forgetting: they measured it on another text.

    def problems(self) -> list[str]:
        """Describes the runs that are missing. Tables and the page show this."""
        counts = (
            (len(self.unfinished), "not finished"),
            (len(self.failed), "failed, see failures/ of the sweep"),
            (len(self.unreadable), f"unreadable, such as {next(iter(self.unreadable), '')}"),
            (len(self.diverged), f"left out, a metric is not finite: {_listed(self.diverged)}"),
            (len(self.other_text), f"without forgetting, measured on another text: {_listed(self.other_text)}"),
        )
        return [f"{pluralized(count, 'run')} {what}" for count, what in counts if count]


def broken_measurements(runs: Iterable[Run], names: Sequence[str] = tuple(FORMS)) -> list[str]:
    """Describes the measurements that exist but cannot be read, one sentence per kind."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        for name in names:
            if (run.path / "analysis" / name).is_file() and run.measured(name) is None:
                found.setdefault(name, []).append(run.path)
    return [f"{name} is truncated or altered and counts as not measured: {_listed(p)}." for name, p in found.items()]


def run_folders(folder: Path) -> list[Path]:
    """Returns the folder itself if it is a run's, otherwise the folders of all runs below it, finished or not."""
    return sorted(Path(place) for place, files in _folders(folder) if files & _RUN_FILES)


def read_runs(*folders: Path) -> Runs:
    """Reads all runs below the folders. If a run occurs twice, the first in order of folders and paths counts."""
    found: dict[str, Run] = {}
    unfinished: list[Path] = []
    failed: list[Path] = []
    unreadable: dict[Path, str] = {}
    for folder in folders:
        for place, files in _folders(folder):
            if "result.json" in files:
                try:
                    run = _read(Path(place))
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
                    unreadable[Path(place)] = f"{type(error).__name__}: {error}"
                else:
                    found.setdefault(run.run_id, run)
            elif "config.yaml" in files:
                unfinished.append(Path(place))
            elif Path(place).name == "failures":
                failed += sorted(Path(place, name) for name in files if name.endswith(".txt"))
    done = {run.path.name for run in found.values()}
    runs = sorted(found.values(), key=lambda run: str(run.path))
    finished = [run for run in runs if all(map(math.isfinite, run.metrics.values()))]
    others = on_another_text([((run.task, run.model), run.general) for run in finished])
    other = [run.path for run, is_other in zip(finished, others, strict=True) if is_other]
    finished = [
        replace(run, metrics=without_text(run.metrics)) if is_other else run
        for run, is_other in zip(finished, others, strict=True)
    ]
    diverged = [run.path for run in runs if not all(map(math.isfinite, run.metrics.values()))]
    return Runs(finished, unfinished, [path for path in failed if path.stem not in done], unreadable, diverged, other)


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


def _folders(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Yields the folder and those below it with the names of their files. Does not descend into runs."""
    for place, inside, files in os.walk(folder):
        names = set(files)
        inside[:] = [] if names & _RUN_FILES else sorted(name for name in inside if name not in _NOT_RUNS)
        yield place, names


def _read(place: Path) -> Run:
    given = json.loads((place / "result.json").read_bytes())
    if given.get("schema", _SCHEMA) > _SCHEMA:
        raise ValueError(f"written by a newer version of deltasam, schema {given['schema']}; update the package")
    if int(given["steps"]) < 1:
        raise ValueError(f"steps={given['steps']}: no training")
    config = given["config"]
    metrics = {intern(str(name)): _metric(value) for name, value in given["metrics"].items()}
    primary = intern(str(given["primary_metric"]))
    metrics.setdefault(primary, _metric(given.get("primary_value")))
    return Run(
        path=place,
        run_id=str(given["run_id"]),
        task=intern(str(given["task"])),
        model=intern(str(given["model"]).removeprefix("./").rstrip("/")),
        method=intern(_method(str(given["method"]), config["method"])),
        seed=int(given["seed"]),
        variant=_variant(config),
        evaluation=_evaluation(config["task"], primary, given.get("eval_rows")),
        settings=_settings(config),
        radius=_radius_text(config["method"].get("rho")),
        conditions=conditions_of(given),
        data=_data(config["task"]),
        primary=primary,
        higher_is_better=bool(given["higher_is_better"]),
        best=_metric(given["best_value"]),
        metrics=metrics,
        reliability=_reliability(given.get("reliability")),
        steps=int(given["steps"]),
        train_seconds=max(float(given["train_seconds"]), 0.001),  # times are rounded to this, and ratios divide by it
        forwards=int(given["forward_passes"]),
        backwards=int(given["backward_passes"]),
        memory=int(given["peak_memory_bytes"]),
        device=intern(str(given["device"]).replace(", 1 threads", ", 1 thread")),  # spelling of earlier runs
        captured=bool(config.get("capture")),
        general=intern(str((given.get("origins") or {}).get(ORIGIN, ""))),
    )


def _metric(value: Any) -> float:
    """Strict JSON writes null for a metric that is not finite."""
    return math.nan if value is None else float(value)


def _variant(config: Mapping[str, Any]) -> int:
    identity = {key: value for key, value in config.items() if key not in _NOT_VARIANT}
    if identity.get("average") is None:  # earlier runs do not name it
        identity.pop("average", None)
    model = config.get("model")
    if isinstance(model, Mapping):  # earlier runs do not name the adapters that they do not have
        identity["model"] = {key: value for key, value in model.items() if (key, value) != ("lora", None)}
    later = _LATER.get(config["method"].get("name"), {})
    method = {key: value for key, value in config["method"].items() if value not in later.get(key, ())}
    if method.get("params") == "all" and not (isinstance(model, Mapping) and model.get("lora")):
        method["params"] = "trained"  # its name since 0.2
    return hash(json.dumps({**identity, "method": method}, sort_keys=True))


def _evaluation(task: Mapping[str, Any], metric: str, rows: Any) -> Evaluation:
    """The dataset of mirror is its training data and does not count."""
    split = str(task.get("eval_split", ""))
    own = (task.get("files") or {}).get(split.partition("[")[0])
    data = "" if task.get("name") == "mirror" else str(own or task.get("dataset") or task.get("hub") or "")
    return Evaluation(intern(split), metric, task.get("eval_rows"), None if rows is None else int(rows), intern(data))


def _data(task: Mapping[str, Any]) -> tuple[str, ...]:
    """How the training data differ from the dataset on purpose."""
    noise, rows = task.get("label_noise"), task.get("rows")
    found = [f"{100 * noise:g}% label noise"] if noise else []
    return tuple(map(intern, [*found, f"{rows} training rows"] if rows else found))


def _reliability(given: Any) -> dict[str, Bins]:
    """The bins of each evaluation. Those that do not have the expected form are left out."""
    found = {}
    for name, bins in given.items() if isinstance(given, Mapping) else ():
        with suppress(TypeError, ValueError):
            found[str(name)] = tuple((float(n), float(p or 0.0), float(right or 0.0)) for n, p, right in bins)
    return found


def _method(name: str, config: Mapping[str, Any]) -> str:
    """Adds the weighting if it is not the paper's, and the radius if it is a rule. Tables treat it as another method.

    Example:
        >>> _method("SAM+RDrop", {"rho": {"name": "LossShare", "share": 0.02}})
        'SAM(LossShare 0.02)+RDrop'
    """
    weighting, rho = config.get("weighting"), config.get("rho")
    kind = weighting.get("name") if isinstance(weighting, Mapping) else None
    parts = [] if kind in (None, "FiniteDifference") else [str(kind)]
    if isinstance(rho, Mapping):
        parts += _radius(rho)
    if not parts:
        return name
    first, plus, others = name.partition("+")
    return f"{first}({', '.join(parts)}){plus}{others}"


def _radius_text(rho: Any) -> str:
    if isinstance(rho, Mapping):
        return intern(" ".join(_radius(rho)))
    return intern(f"{rho:g}") if is_number(rho) else ""


def _radius(rule: Mapping[str, Any]) -> list[str]:
    """Describes a rule for the radius: its name with its main number; a schedule after what it changes."""
    kind = rule.get("name")
    if kind is None:
        return ["groups"]
    if kind == "Scheduled":
        inner = rule.get("rho")
        return [*(_radius(inner) if isinstance(inner, Mapping) else ()), kind]
    value = rule.get(_MAIN.get(kind, ""))
    return [f"{kind} {value:g}" if is_number(value) else str(kind)]


def _settings(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The numbers. A setting of a regulariser gets its prefix if the method has the same name, such as SMART.eta."""
    found: dict[str, float] = {"lr": config["optimizer"]["lr"]}
    average = {"name": "average", **(config.get("average") or {})}
    if average.get("kind") == "swa":
        del average["decay"]  # no effect
    for part in (config["method"], *config["regularisers"], average):
        rho = part.get("rho")
        for name, value in {**part, **(_numbers(rho, "rho") if isinstance(rho, Mapping) else {})}.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[intern(f"{part['name']}.{name}" if name in found else name)] = float(value)
    return tuple(found.items())


def _numbers(rule: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The numbers of a rule for the radius, such as ``rho.share``; ``rho`` itself if a schedule changes a number."""
    found: dict[str, Any] = {}
    for key, value in rule.items():
        name = prefix if key == "rho" else f"{prefix}.{key}"
        found |= _numbers(value, name) if isinstance(value, Mapping) else {name: value}
    return found
