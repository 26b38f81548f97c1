"""Reads a tree of run folders, ten thousand in a few seconds, into small records; without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from deltasam.lab.report._evaluation import Evaluation
from deltasam.lab.report._measured import RISK, is_float, listed, risk_in
from deltasam.step.names import counted

_NOT_RUNS = {"model", "checkpoints", "logs", "locks", "tensorboard", "analysis"}
_FAILURES = "failures"  # of a sweep: a traceback for each run that failed
_OF_A_RUN = {"config.yaml", "result.json"}
# What does not make two runs different but for their seed: what a run's id leaves out (`RunConfig.run_id`, which is
# not imported, for its torch; a test compares them), and options that came after runs were first numbered, at these.
_NOT_VARIANT = ("seed", "data", "checkpoint_every", "capture", "on_out_of_memory", "workers")
_SCHEMA = 1  # the newest that is known; likewise that of `experiments.Result`
_LATER = {"PerInstanceSAM": {"factors": ("auto", "exact")}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What tables and plots need of one finished run.

    Attributes:
        path: The run folder.
        run_id: Hash of its configuration.
        task: Name of the task.
        model: The model as the run named it, its whole path; :func:`short_models` makes names to show.
        method: Class of the method, and of the regularisers, joined by ``+``; weights other than the paper's in
            brackets, as in ``DeltaSAM(RandomWeights)``.
        seed: The seed.
        variant: The configuration but for the seed, as a number: runs of one variant are repetitions of each other.
        split: What it was evaluated on,
        evaluation: and how, in full.
        settings: Hyperparameters by which variants of one method differ: ``rho``, ``eta``, ``scale``, ``lr``, ...
        primary: Name of the primary metric.
        higher_is_better: Whether more of it is better.
        best: Its best value among the evaluations.
        metrics: Metrics of the final weights.
        steps: Updates.
        train_seconds: Time of the training.
        forwards: Forward passes.
        backwards: Backward passes.
        memory: Peak memory in bytes.
        device: What was computed on.
    """

    path: Path
    run_id: str
    task: str
    model: str
    method: str
    seed: int
    variant: int
    split: str
    evaluation: Evaluation
    settings: tuple[tuple[str, float], ...]
    primary: str
    higher_is_better: bool
    best: float
    metrics: Mapping[str, float]
    steps: int
    train_seconds: float
    forwards: int
    backwards: int
    memory: int
    device: str

    def risk(self) -> dict[str, Any] | None:
        """The adversarial risk, where it was measured; a file that is cut short or altered counts as none."""
        return risk_in(self.analysis(RISK))

    def analysis(self, name: str) -> dict[str, Any] | None:
        """A measurement in the folder, or None."""
        try:
            found = json.loads((self.path / "analysis" / name).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def log(self) -> list[dict[str, Any]]:
        """The numbers in ``metrics.jsonl``, by update; none where there is no such file."""
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found = [entry for line in lines if line.startswith("{") and isinstance(entry := _parsed(line), dict)]
        numbers = [{name: value for name, value in e.items() if is_float(value)} for e in found]
        return [entry for entry in numbers if "step" in entry]


@dataclass(frozen=True)
class Runs:
    """All runs under a folder.

    Attributes:
        finished: The finished runs, in the order of their paths.
        unfinished: Run folders without a result.
        failed: Traceback files of failed runs of sweeps.
        unreadable: Results that could not be read, with the reason.
        diverged: Runs with a metric that is not finite: they have no place in a mean, and are not among the finished.
    """

    finished: list[Run]
    unfinished: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)
    diverged: list[Path] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What is missing, in words; tables say it."""
        counts = (
            (len(self.unfinished), "not finished"),
            (len(self.failed), "failed, see failures/ of the sweep"),
            (len(self.unreadable), f"unreadable, such as {next(iter(self.unreadable), '')}"),
            (len(self.diverged), f"left out, a metric is not finite: {listed(self.diverged)}"),
        )
        return [f"{counted(count, 'run')} {what}" for count, what in counts if count]


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, otherwise those of all runs in it at any depth, finished or not."""
    return sorted(Path(place) for place, files in _folders(folder) if files & _OF_A_RUN)


def read_runs(*folders: Path) -> Runs:
    """All runs under the folders; of the same run twice the first counts, in the order of folders and paths."""
    found: dict[str, Run] = {}
    unfinished: list[Path] = []
    failed: list[Path] = []
    unreadable: dict[Path, str] = {}
    for folder in folders:
        for place, files in _folders(folder):
            if "result.json" in files:
                try:
                    run = _run(Path(place))
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
                    unreadable[Path(place)] = f"{type(error).__name__}: {error}"
                else:
                    found.setdefault(run.run_id, run)
            elif "config.yaml" in files:
                unfinished.append(Path(place))
            elif Path(place).name == _FAILURES:
                failed += sorted(Path(place, name) for name in files if name.endswith(".txt"))
    done = {run.path.name for run in found.values()}
    failed = [path for path in failed if path.stem not in done]
    runs = sorted(found.values(), key=lambda run: str(run.path))
    sound = [run for run in runs if all(map(math.isfinite, run.metrics.values()))]
    kept = {run.run_id for run in sound}
    diverged = [run.path for run in runs if run.run_id not in kept]
    return Runs(sound, unfinished, failed, unreadable, diverged)


def _folders(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """The folder and those in it, with the names of their files, but for what lies inside a run."""
    for place, inside, files in os.walk(folder):
        names = set(files)
        if names & _OF_A_RUN:
            inside.clear()  # no runs inside a run
        else:
            inside[:] = sorted(name for name in inside if name not in _NOT_RUNS)
        yield place, names


def _run(place: Path) -> Run:
    given = json.loads((place / "result.json").read_bytes())
    if given.get("schema", _SCHEMA) > _SCHEMA:
        raise ValueError(f"written by a newer version of deltasam, schema {given['schema']}; update the package")
    if int(given["steps"]) < 1:
        raise ValueError(f"steps={given['steps']}: no training")
    config = given["config"]
    metrics = {intern(str(name)): _number(value) for name, value in given["metrics"].items()}
    primary = intern(str(given["primary_metric"]))
    metrics.setdefault(primary, _number(given.get("primary_value")))
    return Run(
        path=place,
        run_id=str(given["run_id"]),
        task=intern(str(given["task"])),
        model=intern(str(given["model"]).removeprefix("./").rstrip("/")),
        method=intern(_method(str(given["method"]), config["method"])),
        seed=int(given["seed"]),
        variant=_variant(config),
        split=intern(str(config["task"].get("eval_split", ""))),
        evaluation=_evaluation(config["task"], primary, given.get("eval_rows")),
        settings=_settings(config),
        primary=primary,
        higher_is_better=bool(given["higher_is_better"]),
        best=_number(given["best_value"]),
        metrics=metrics,
        steps=int(given["steps"]),
        train_seconds=max(float(given["train_seconds"]), 0.001),  # rounded to that; ratios divide by it
        forwards=int(given["forward_passes"]),
        backwards=int(given["backward_passes"]),
        memory=int(given["peak_memory_bytes"]),
        device=intern(str(given["device"]).replace(", 1 threads", ", 1 thread")),  # as earlier runs wrote it
    )


def _number(value: Any) -> float:
    """A metric; null is what strict JSON has for one that is not finite."""
    return math.nan if value is None else float(value)


def _variant(config: Mapping[str, Any]) -> int:
    """What makes a run's id but for the seed, as a number."""
    identity = {key: value for key, value in config.items() if key not in _NOT_VARIANT}
    later = _LATER.get(config["method"].get("name"), {})
    identity["method"] = {
        key: value for key, value in config["method"].items() if key not in later or value not in later[key]
    }
    return hash(json.dumps(identity, sort_keys=True))


def _evaluation(task: Mapping[str, Any], metric: str, rows: Any) -> Evaluation:
    """How it was evaluated; the dataset of mirror is what it was trained on, and does not count."""
    split = str(task.get("eval_split", ""))
    own = (task.get("files") or {}).get(split.partition("[")[0])
    return Evaluation(
        split=intern(split),
        metric=metric,
        sample=task.get("eval_rows"),
        rows=None if rows is None else int(rows),
        data="" if task.get("name") == "mirror" else intern(str(own or task.get("dataset") or task.get("hub") or "")),
    )


def _method(name: str, config: Mapping[str, Any]) -> str:
    """The method with its weights, where those are not the paper's: another method as far as tables go."""
    weighting = config.get("weighting")
    kind = weighting.get("name") if isinstance(weighting, Mapping) else None
    if kind in (None, "FiniteDifference"):
        return name
    first, plus, others = name.partition("+")
    return f"{first}({kind}){plus}{others}"


def _settings(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The numbers; of a regulariser with its name before it where the method has one of that name, as SMART's eta."""
    found: dict[str, float] = {"lr": config["optimizer"]["lr"]}
    for part in (config["method"], *config["regularisers"]):
        for name, value in part.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[intern(f"{part['name']}.{name}" if name in found else name)] = float(value)
    return tuple(found.items())


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # the last line of a run that was killed
        return None
