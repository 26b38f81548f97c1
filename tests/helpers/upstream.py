"""The rows of the table of Trainer options: how one is run, and how two runs are compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from deltasam.methods import Method
from helpers.trainers import arguments, weights
from helpers.upstream_setups import Setup, bert


def train(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A training."""
    trainer = make()
    output = trainer.train()
    return trainer, {"loss": output.training_loss, "steps": output.global_step, **without_clocks(output.metrics)}


def train_and_predict(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A training, then predictions."""
    trainer, result = train(make)
    return trainer, (result, *prediction(trainer))


def evaluate_and_predict(make: Callable[[], Any]) -> tuple[Any, Any]:
    """No training."""
    trainer = make()
    return trainer, (without_clocks(trainer.evaluate()), *prediction(trainer))


def prediction(trainer: Any) -> tuple[Any, ...]:
    found = trainer.predict(trainer.eval_dataset)
    return found.predictions, found.label_ids, without_clocks(found.metrics)


def resume(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A training, and a second one that resumes from a checkpoint of the first."""
    first = make()
    first.train()
    second = make()
    place = Path(first.args.output_dir) / "checkpoint-4"
    second.train(resume_from_checkpoint=str(place))
    assert not list(differences(weights(second.model), weights(first.model), 0.0))
    return second, None


def train_with_reports(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A training, and the numbers in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, result = train(make)
    places = {file.parent for file in Path(trainer.args.output_dir).rglob("events.out.tfevents.*")}
    shown = {}
    for place in places:
        events = EventAccumulator(str(place)).Reload()
        shown |= {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(shown["train/loss"]) == 3
    return trainer, (result, without_clocks(shown))


@dataclass(frozen=True)
class Row:
    """One option of the Trainer.

    Attributes:
        name: Its name.
        options: ``TrainingArguments``.
        make: Makes the model and the data, the same every time.
        tolerance: 0 where ERM is the plain Trainer bit for bit, else the largest difference, absolute and relative.
        act: What is done with a Trainer that a function makes: the one to look at, and a result to compare.
        methods: Which methods are tried: "erm", "sam-0" (without a perturbation), "sam".
        needs: Modules without which the row is skipped.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], Setup] = bert
    tolerance: float = 0.0
    act: Callable[[Callable[[], Any]], tuple[Any, Any]] = train
    methods: Sequence[str] = ("erm", "sam-0", "sam")
    needs: Sequence[str] = ()

    def skip_reason(self) -> str | None:
        """Why the row cannot be run with the installed libraries."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            return f"{missing[0]} is not installed"
        known = {each.name for each in fields(self.make().arguments)}
        unknown = sorted(set(self.options) - known)
        return f"TrainingArguments of transformers {hf.__version__} has no {unknown[0]}" if unknown else None


@dataclass
class Outcome:
    """The results of a run."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logs: list[dict[str, Any]]
    seen: list[tuple[Any, ...]]
    result: Any


def run(row: Row, method: Method | None, folder: Path) -> Outcome:
    """Runs a row, with the plain Trainer if there is no method."""
    # On a CPU without bf16 instructions the first product in bf16 makes torch disable oneDNN for the process.
    # Later products in float32 would then be rounded differently.
    torch.backends.mkldnn.set_flags(True)
    seen = Seen()
    start: dict[str, Tensor] = {}

    def make() -> Any:
        setup = row.make()
        args = arguments(
            folder, kind=setup.arguments, **({"logging_strategy": "steps", "logging_steps": 2} | row.options)
        )
        start.update(weights(setup.model))
        given = {"model": setup.model, "args": args, "train_dataset": setup.data, "callbacks": [seen], **setup.more}
        plain, ours = setup.trainers
        return plain(**given) if method is None else ours(**given, method=method, **setup.ours)

    trainer, result = row.act(make)
    logs = [without_clocks(entry) for entry in trainer.state.log_history]
    return Outcome(start, weights(trainer.model), logs, seen.events, result)


class Seen(hf.TrainerCallback):
    """Records every event with the state that a callback gets."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            flags = [control.should_save, control.should_evaluate, control.should_log, control.should_training_stop]
            rates = [group["lr"] for group in kwargs["optimizer"].param_groups] if kwargs.get("optimizer") else None
            self.events.append((name, state.global_step, state.epoch, state.max_steps, flags, rates))

        return note


def without_clocks(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A log entry without times, numbers of passes, and metrics that only TRL's loss computes."""
    clocks = ("_runtime", "_per_second", "_time")
    other = ("train_forwards", "train_backwards", "entropy", "mean_token_accuracy", "num_tokens")
    return {name: value for name, value in entry.items() if not name.endswith(clocks + other)}


def differences(ours: Any, plain: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Where two values, which may be nested, differ by more than the tolerance; NaN is equal to NaN."""
    if isinstance(plain, (Tensor, np.ndarray, float)) and isinstance(ours, type(plain)):
        one, other = np.asarray(ours), np.asarray(plain)
        if one.shape != other.shape or not np.allclose(one, other, tolerance, tolerance, equal_nan=True):
            yield f"{path}: {ours} where the plain Trainer has {plain}"
    elif isinstance(plain, Mapping) and isinstance(ours, Mapping) and ours.keys() == plain.keys():
        for key in plain:
            yield from differences(ours[key], plain[key], tolerance, f"{path}/{key}")
    elif isinstance(plain, (list, tuple)) and isinstance(ours, (list, tuple)) and len(ours) == len(plain):
        for i, (one, other) in enumerate(zip(ours, plain, strict=True)):
            yield from differences(one, other, tolerance, f"{path}/{i}")
    elif ours != plain:
        yield f"{path}: {ours} where the plain Trainer has {plain}"


def params(rows: Sequence[Row]) -> list[Any]:
    """One parameter of a test per row and method."""
    return [pytest.param(row, method, id=f"{row.name}-{method}") for row in rows for method in row.methods]
