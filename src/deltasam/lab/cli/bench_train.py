"""``deltasam bench train``: whole trainings by the path of ``deltasam train``, side by side."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from deltasam.lab.bench.options import TrainWay
from deltasam.lab.cli._errors import InputError
from deltasam.lab.cli._runs import bad_input

if TYPE_CHECKING:
    from deltasam.lab.bench.train import Trained, Training
    from deltasam.lab.experiments import Result, RunConfig


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Trains a task with several methods, eager and captured, and compares the wall time of the trainings.

    A short training in each way, which is not counted, comes first. Nothing is kept but what `--output` and `--json`
    name, and never weights. A method may bring options, and settings for all runs follow the task.

    Examples:
      deltasam bench train mrpc --model minilm-l6 --methods sam delta-sam --ways eager captured
      deltasam bench train docstrings batch.size=8 --steps 10 --methods erm sam delta-sam:probe_every=4
    """

    task: Positional[str]
    """What to learn; `deltasam list tasks` has them all."""

    settings: Positional[tuple[str, ...]] = ()
    """Settings of all runs, as section.option=value, see `deltasam train --help`."""

    model: str = "minilm-l6"
    """A folder, a name on the hub, or minilm-l6 (in a package, no download)."""

    methods: tuple[str, ...] = ("erm", "sam", "delta-sam", "per-instance-sam")
    """Methods, each with options of its own if it needs some: name:option=value,option=value."""

    ways: tuple[TrainWay, ...] = ("eager", "captured")
    """How to run every method; captured is left out where there is no GPU."""

    epochs: float = 3.0
    """Passes over the training data."""

    steps: int | None = None
    """Number of updates, instead of epochs."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Mixed precision by autocast, or none."""

    repeats: int = 1
    """How often to train each; all of them take turns."""

    warmup: int = 8
    """Updates of the training in each way that is not counted, which loads kernels and libraries."""

    seed: int = 42
    """Seed of all runs."""

    data: Path | None = None
    """Folder with <dataset>/<split>.jsonl.gz; otherwise the variable DELTASAM_DATA, otherwise the hub."""

    output: Path | None = None
    """Keep the run folders here, without weights; a run that is finished there is not repeated."""

    json: Path | None = None
    """Write the results to this file."""

    def run(self) -> None:
        """Trains, prints the table and writes the file."""
        for name, value, least in (("repeats", self.repeats, 1), ("warmup", self.warmup, 0)):
            if value < least:
                raise InputError(f"--{name} {value}: must be at least {least}")
        if not (self.methods and self.ways):
            raise InputError("--methods and --ways: name at least one each, such as --methods sam --ways eager")
        with bad_input(), self._folder() as folder:
            self._measure(folder)

    def _measure(self, folder: Path) -> None:
        import torch

        from deltasam.lab.bench import train
        from deltasam.lab.cli._progress import bar, quiet
        from deltasam.lab.experiments import run

        ways = self._possible_ways()
        plan = list(dict.fromkeys(train.Training(method, way) for way in ways for method in self.methods))
        configs = {each: self.config(each) for each in plan}  # mistakes are told before any training
        quiet()
        if self.warmup:
            self._warm_up(ways)

        def train_one(each: Training, number: int) -> Trained:
            place = folder / f"{each.name.replace(' ', '-')}-{number + 1}"
            pace = train.Pace()
            with bar(f"{each.name:<24}") as shown:

                def watch(*progress: Any) -> None:
                    pace()
                    shown(*progress)

                result = run(configs[each], place, watch=watch, keep_weights=False)
            shutil.rmtree(place / "checkpoints", ignore_errors=True)  # of a training that was stopped in between
            return _trained(result, pace.seconds)

        first = configs[plan[0]]
        model = Path(self.model).name  # where a folder lies is this machine's own
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
        """The ways that were asked for, as far as this machine has them."""
        import torch

        ways = [way for way in dict.fromkeys(self.ways) if way == "eager" or torch.cuda.is_available()]
        if not ways:
            raise InputError("--ways captured: needs a GPU; use --ways eager")
        if len(ways) < len(set(self.ways)):
            print("captured is left out: it needs a GPU", file=sys.stderr)
        return ways

    def _warm_up(self, ways: Sequence[TrainWay]) -> None:
        """A short training in each way: the first captured step of a process pays for more than the first eager one.

        Not in `--output`: what is left of one that was stopped would be another run there.
        """
        from deltasam.lab.bench.train import Training
        from deltasam.lab.cli._progress import bar
        from deltasam.lab.experiments import run

        for way in ways:
            short = self.config(Training(self.methods[0], way), steps=self.warmup)
            with _temporary_folder() as folder, bar(f"warm-up {way}") as watch:
                run(short, folder / "warm-up", watch=watch, keep_weights=False)

    def config(self, training: Training, steps: int | None = None) -> RunConfig:
        """The run of one training: evaluated at its end only, without checkpoints."""
        from deltasam.lab.experiments import ConfigError, resolve

        name, _, own = training.method.partition(":")
        options = [f"method.{option}" for option in own.split(",") if option]
        if any("=" not in option for option in options):
            raise ConfigError(f"--methods {training.method}: options have the form name:option=value,option=value")
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

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.output is not None:
            yield self.output
            return
        with _temporary_folder() as folder:
            yield folder


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="deltasam-bench-") as folder:
        yield Path(folder)


def _trained(result: Result, seconds_per_update: float | None) -> Trained:
    from deltasam.lab.bench.train import Trained

    return Trained(
        train_seconds=result.train_seconds,
        seconds_per_update=seconds_per_update,
        updates=result.steps,
        forwards=result.forward_passes,
        backwards=result.backward_passes,
        skipped=result.skipped_steps,
        metric=result.primary_metric,
        value=result.primary_value,
        peak_bytes=result.peak_memory_bytes,
        device=result.device,
    )
