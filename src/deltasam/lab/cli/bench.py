"""``deltasam bench ...``: the cost of a training step, and the wall time of whole trainings."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from deltasam.lab.bench.options import StepOptions, TrainWay
from deltasam.lab.cli._errors import InputError, one_line_errors
from deltasam.lab.cli._output import progress_bar, silence_libraries

if TYPE_CHECKING:
    from deltasam.lab.bench.train import Trained, Training
    from deltasam.lab.experiments import RunConfig


@dataclass(frozen=True, kw_only=True)
class BenchStep(StepOptions):
    """Measures a training step of every method: time, forward and backward passes, peak memory."""

    def run(self) -> None:
        """Measures, prints the table and writes the files."""
        from deltasam.lab.bench import step

        try:
            step.run(self)
        except ValueError as error:
            raise InputError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Trains a task with several methods, eager and captured, and compares their wall time.

    A short warm-up run comes first. Only the files of `--output` and `--json` are kept, and never weights. A method
    may have its own options; settings for all runs follow the task.

    Examples:
      deltasam bench train mrpc --model minilm-l6 --methods sam delta-sam --ways eager captured
      deltasam bench train docstrings batch.size=8 --steps 10 --methods erm sam delta-sam:probe_every=4
    """

    task: Positional[str]
    """Name of the task, see `deltasam list tasks`."""

    settings: Positional[tuple[str, ...]] = ()
    """Settings of all runs as section.option=value, see `deltasam train --help`."""

    model: str = "minilm-l6"
    """The model: a folder, a name on the hub, or minilm-l6 (included in a package, no download)."""

    methods: tuple[str, ...] = ("erm", "sam", "delta-sam", "per-instance-sam")
    """Methods, by name or with options: name:option=value,option=value."""

    ways: tuple[TrainWay, ...] = ("eager", "captured")
    """How to run each method. `captured` needs a GPU and is skipped without one."""

    epochs: float = 3.0
    """Passes over the training data."""

    steps: int | None = None
    """Number of updates. Overrides --epochs."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the model; bf16 and fp16 use autocast."""

    repeats: int = 1
    """Number of repetitions. In each, every method trains once."""

    warmup: int = 8
    """Number of updates of the warm-up runs, which load kernels and libraries."""

    seed: int = 42
    """Seed of all runs."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz. Defaults to the variable DELTASAM_DATA, then to the hub."""

    output: Path | None = None
    """Folder for the run folders, which are kept without weights. Finished runs are not repeated."""

    json: Path | None = None
    """File to write the results to."""

    def run(self) -> None:
        """Trains, prints the table and writes the file."""
        for name, least in (("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least {least}")
        if not (self.methods and self.ways):
            raise InputError("--methods and --ways need at least one value each, such as --methods sam --ways eager")
        with one_line_errors(), tempfile.TemporaryDirectory(prefix="deltasam-bench-") as temporary:
            self._measure(Path(temporary))

    def _measure(self, temporary: Path) -> None:
        import torch

        from deltasam.lab.bench import train
        from deltasam.lab.experiments import run

        ways = self._possible_ways()
        plan = list(dict.fromkeys(train.Training(method, way) for way in ways for method in self.methods))
        configs = {each: self.config(each) for each in plan}  # raises before any training
        silence_libraries()
        # The first captured step of a process is slower even after eager ones, so each way has its own warm-up. It is
        # not in --output, where an interrupted warm-up would look like a run.
        for way in ways if self.warmup else ():
            short = self.config(train.Training(self.methods[0], way), steps=self.warmup)
            with progress_bar(f"warm-up {way}") as watch:
                run(short, temporary / f"warm-up-{way}", watch=watch, keep_weights=False)

        def train_one(each: Training, number: int) -> Trained:
            place = (self.output or temporary) / f"{each.name.replace(' ', '-')}-{number + 1}"
            times: list[float] = []
            with progress_bar(f"{each.name:<24}") as shown:

                def watch(*progress: Any) -> None:
                    times.append(time.perf_counter())
                    shown(*progress)

                result = run(configs[each], place, watch=watch, keep_weights=False)
            shutil.rmtree(place / "checkpoints", ignore_errors=True)  # left by a training that was stopped
            return train.Trained(
                train_seconds=result.train_seconds,
                seconds_per_update=train.median_gap(times),
                updates=result.steps,
                forwards=result.forward_passes,
                backwards=result.backward_passes,
                skipped=result.skipped_steps,
                metric=result.primary_metric,
                value=result.primary_value,
                peak_bytes=result.peak_memory_bytes,
                device=result.device,
            )

        first = configs[plan[0]]
        model = Path(self.model).name  # without the path, which is private to this machine
        options = {
            "task": first.task.name, "model": model, "precision": first.precision, "epochs": first.schedule.epochs,
            "steps": first.schedule.steps, "batch": first.batch.size, "repeats": self.repeats, "seed": first.seed,
            "settings": list(self.settings),
        }  # fmt: skip
        facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
        report = train.measure(plan, train_one, repeats=self.repeats, options=options, machine=facts)
        train.show(report)
        if self.json is not None:
            train.write_json(report, self.json)

    def _possible_ways(self) -> list[TrainWay]:
        """Returns the requested ways that this machine supports."""
        import torch

        ways = [way for way in dict.fromkeys(self.ways) if way == "eager" or torch.cuda.is_available()]
        if not ways:
            raise InputError("--ways captured: needs a GPU; use --ways eager")
        if len(ways) < len(set(self.ways)):
            print("captured is skipped: it needs a GPU", file=sys.stderr)
        return ways

    def config(self, training: Training, steps: int | None = None) -> RunConfig:
        """Returns the run of one training: evaluated at the end only, without checkpoints."""
        from deltasam.lab.experiments import ConfigError, resolve

        name, _, own = training.method.partition(":")
        options = [f"method.{option}" for option in own.split(",") if option]
        if any("=" not in option for option in options):
            raise ConfigError(f"--methods {training.method}: write options as name:option=value,option=value")
        length = steps or self.steps
        return resolve(
            method=name,
            options={
                "task": self.task,
                "model": self.model,
                "seed": self.seed,
                "precision": self.precision,
                "schedule": {"steps": length} if length is not None else {"epochs": self.epochs},
                "evaluate_every": "end",
                "checkpoint_every": "never",
                "capture": training.way == "captured",
                "data": str(self.data.resolve()) if self.data is not None else None,
            },
            settings=[*self.settings, *options],
        )
