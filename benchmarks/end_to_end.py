"""Wall time of short trainings: eager, captured, compiled. Needs torch and transformers, data and a model in folders.

    PYTHONPATH=src python benchmarks/end_to_end.py --data DATA --model MODEL --side-by-side
    python -m deltasam.lab.pages  # the table of docs/speed.md

A plain training loop: AdamW, a constant learning rate, the same batches for all. Captured and compiled steps pad the
texts to few lengths. First every shape takes a few steps, which compile or record it (``prepare_seconds``); then the
weights and the optimizer are reset, and the training is timed. All methods of a way share the compiled model, so the
first of them compiles the most. ``--side-by-side`` prepares a training of every task at the same time, each in its own
process, and then times one after the other. The files are like those of ``deltasam bench train``, which needs more
packages.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from speed_turns import Turns, side_by_side

from deltasam.lab.bench.options import Way
from deltasam.lab.bench.train import Trained, Training, TrainReport, measure, show
from deltasam.lab.catalogue import find_method
from deltasam.lab.tasks import TASKS, DataSource, load_tokenizer
from deltasam.speed.capture import Captured, PadToBuckets
from deltasam.speed.compiling import compiled

BUCKETS = (64, 128)
PREPARING = 3  # steps of each shape: one ordinary, one recorded, one replayed
TOGETHER = 10  # updates between two looks at the clock, which wait for the device
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Course:
    """The data, the model and the settings that all trainings of a task share."""

    task: Any
    data: Any
    tokenizer: Any
    model: Any
    items: Sequence[Any]
    options: argparse.Namespace
    device: torch.device
    initial: dict[str, torch.Tensor]
    made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, options: argparse.Namespace) -> Course:
        """Loads data and model."""
        task, device = TASKS[name], torch.device(options.device)
        data, tokenizer = task.load(DataSource.find(options.data)), load_tokenizer(str(options.model))
        torch.manual_seed(options.seed)
        model = task.model(str(options.model), data).to(device).train()
        rows = random.Random(options.seed).sample(data.splits[task.train_split], k=len(data.splits[task.train_split]))
        items = task.encode(rows[: options.updates * options.batch], tokenizer)
        initial = {key: value.clone() for key, value in model.state_dict().items()}
        return cls(task, data, tokenizer, model, items, options, device, initial)

    def batches(self, way: Way) -> list[dict[str, Any]]:
        """The batches on the device, all of the same number of rows; the rows are repeated if they are too few."""
        collate = self.task.collator(self.tokenizer)
        if way != "eager":
            collate = PadToBuckets(collate, pad_token_id=self.tokenizer.pad_token_id, buckets=BUCKETS)
        size, whole = self.options.batch, len(self.items) - len(self.items) % self.options.batch
        found = [collate(list(self.items[at : at + size])) for at in range(0, whole, size)]
        chosen = [found[number % len(found)] for number in range(self.options.updates)]
        return [{key: value.to(self.device) for key, value in batch.items()} for batch in chosen]

    def fast(self) -> Any:
        """The compiled model, the same one for all methods."""
        if "compiled" not in self.made:
            self.made["compiled"] = compiled(self.model, dynamic=False)
        return self.made["compiled"]

    def precision(self) -> AbstractContextManager[Any]:
        """The context of a step."""
        kind = AUTOCAST.get(self.options.precision)
        return nullcontext() if kind is None else torch.autocast(self.device.type, dtype=kind)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def reset(self, optimizer: torch.optim.Optimizer) -> None:
        """Returns to the first weights and to an optimizer without moments; all tensors stay where they are."""
        self.model.load_state_dict(self.initial)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        torch.manual_seed(self.options.seed)


def stepper(course: Course, each: Training) -> tuple[Callable[[Any], Any], torch.optim.Optimizer]:
    """A training step, and its optimizer."""
    method, objective = find_method(each.method)(), course.task.objective()
    captured, lr = "captured" in each.way, course.options.lr
    on_gpu = {"fused": True, "capturable": True} if captured else {"fused": course.device.type == "cuda"}
    optimizer = torch.optim.AdamW(course.model.parameters(), lr=lr, **on_gpu)
    model = course.fast() if "compiled" in each.way else course.model
    if captured:
        recorded = Captured(method, optimizer=optimizer)

        def replayed(batch: Any) -> Any:
            with course.precision():
                step = recorded.step(model, batch, objective)
            if recorded.report.obstacles:
                raise RuntimeError(f"not captured: {next(iter(recorded.report.obstacles))}")
            return step

        return replayed, optimizer

    def eager(batch: Any) -> Any:
        with course.precision():
            step = method.backward(model, batch, objective)
        optimizer.step()
        optimizer.zero_grad()
        return step

    return eager, optimizer


def train(course: Course, each: Training, alone: AbstractContextManager[Any]) -> Trained:
    """Prepares every shape, resets, and trains; it is timed inside ``alone``."""
    step, optimizer = stepper(course, each)
    batches = course.batches(each.way)
    start = time.perf_counter()
    shapes = {tuple(batch["input_ids"].shape): batch for batch in batches}
    for batch in shapes.values():  # an eager step of a new shape, too, takes long: kernels are chosen
        for _ in range(1 if each.way == "eager" else PREPARING):
            step(batch)
    course.synchronize()
    prepared = time.perf_counter() - start
    course.reset(optimizer)
    if course.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with alone:
        start = time.perf_counter()
        taken = list(timed(course, step, batches))
        seconds = time.perf_counter() - start
    logits, _ = course.task.outputs(course.model, course.tokenizer, rows := course.data.splits[course.task.eval_split])
    course.model.train()
    right = [float(guess == row["label"]) for guess, row in zip(logits.argmax(-1).tolist(), rows, strict=True)]
    paces = sorted(seen for seen, _ in taken)
    return Trained(
        train_seconds=seconds, prepare_seconds=prepared, seconds_per_update=paces[len(paces) // 2],
        updates=len(batches), forwards=sum(f for _, (f, _) in taken), backwards=sum(b for _, (_, b) in taken),
        skipped=0, metric="accuracy", value=sum(right) / len(right),
        peak_bytes=torch.cuda.max_memory_allocated() if course.device.type == "cuda" else 0,
        device=torch.cuda.get_device_name() if course.device.type == "cuda" else "CPU",
    )  # fmt: skip


def timed(
    course: Course, step: Callable[[Any], Any], batches: Sequence[Any]
) -> Iterator[tuple[float, tuple[int, int]]]:
    """Yields the seconds of an update, averaged over some updates, and their passes."""
    for first in range(0, len(batches), TOGETHER):
        some = batches[first : first + TOGETHER]
        start = time.perf_counter()
        steps = [step(batch) for batch in some]
        course.synchronize()
        seconds = (time.perf_counter() - start) / len(some)
        yield seconds, (sum(each.forwards for each in steps), sum(each.backwards for each in steps))


def compare(name: str, options: argparse.Namespace, until: float, turns: Turns | None) -> TrainReport | None:
    """Makes the trainings of a task; None if there was no time for any."""
    if time.perf_counter() > until:
        return None
    course = Course.of(name, options)

    def one(each: Training, _: int) -> Trained | None:
        if time.perf_counter() > until:
            print(f"{name} {each.name}: skipped, out of time", flush=True)
            return None
        try:
            found = train(course, each, nullcontext() if turns is None else turns.alone(f"prepared {each.name}"))
        except Exception as error:  # noqa: BLE001 - the others can still be measured
            print(f"{name} {each.name}: failed: {type(error).__name__}: {error}".partition("\n")[0], flush=True)
            return None
        finally:
            if turns is not None:
                turns.arrive(f"prepared {each.name}")  # it may have failed before
                turns.meet(f"timed {each.name}")  # what is prepared next would disturb the others
        print(f"{name} {each.name}: {found.train_seconds:.1f} s after {found.prepare_seconds:.1f} s", flush=True)
        return found

    plan = [Training(method, way) for way in options.ways for method in options.methods]
    facts = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    shared = {
        "task": name, "model": options.model.name, "precision": options.precision, "epochs": None,
        "steps": options.updates, "batch": options.batch, "repeats": 1, "seed": options.seed, "settings": [],
    }  # fmt: skip
    return measure(plan, one, repeats=1, options=shared, machine=facts)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the trainings and writes a file for each task."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with <dataset>/<split>.jsonl.gz")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "mnli"])
    parser.add_argument("--methods", nargs="+", default=["erm", "sam", "delta-sam", "per-instance-sam"])
    parser.add_argument("--ways", nargs="+", choices=get_args(Way), default=["eager", "captured", "compiled"])
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--budget", type=float, default=1e9, help="start no training after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("results/speed/train"))
    parser.add_argument("--side-by-side", action="store_true", help="prepare the trainings of all tasks in parallel")
    parser.add_argument("--meet", nargs=3, metavar=("FOLDER", "NUMBER", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.side_by_side and options.meet is None:
        side_by_side(__file__, [[*given, "--tasks", name] for name in options.tasks])  # the last --tasks counts
        return
    turns = None if options.meet is None else Turns(Path(options.meet[0]), int(options.meet[1]), options.meet[2])
    until = time.perf_counter() + options.budget
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    private = (str(options.data), str(options.model), str(options.out))  # paths of this machine
    own = given[: -len(options.meet) - 1] if turns else given  # side_by_side appends --meet and its values
    shown = ["FOLDER" if word in private else word for word in own]
    command = shlex.join(["python", "benchmarks/end_to_end.py", *shown])
    for name in options.tasks:
        report = compare(name, options, until, turns)
        if report is None or not report.rows:
            continue
        show(report)
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"part": "train", "command": command, **asdict(report)}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
