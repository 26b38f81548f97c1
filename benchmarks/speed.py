"""The measurements of the speed page, many in one process. Weights are random, nothing is downloaded.

Needs torch and transformers, and a CUDA device for all parts except ``cpu`` and ``adamw``:

    PYTHONPATH=src python benchmarks/speed.py --part figures eager loop growth compiled
    PYTHONPATH=src python benchmarks/speed.py --part cpu adamw --device cpu
    python -m deltasam.lab.pages  # the tables and figures of docs/speed.md

Every measurement is written to its own file as soon as it is made. A measurement that fails is recorded, and the rest
continues. ``--out all.jsonl`` collects all in one file, a line each, and ``--unpack all.jsonl --out results/speed``
writes the single files. ``--side-by-side`` prepares (compiles) all measurements at the same time, each in its own
process, and then makes them one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

MODELS = ("bert-base", "roberta-large")
SIZES = ("16x64", "32x128")
PRECISIONS = ("bf16", "tf32")
METHODS = ("delta-sam-ambient", "delta-sam-every-4", "per-instance-sam")
EXACT = "per-instance-sam-exact"  # under autocast it would be the same as per-instance-sam
CPU_SHAPES = (("bert-4x256", "16x64"), ("bert-2x768", "8x128"), ("bert-2x768", "16x64"))
BATCHES = (8, 16, 32, 64, 128)
LENGTHS = (32, 64, 128, 256, 512)
SHAPES = ("bert-2x128", "bert-4x256", "bert-4x512", "bert-8x512", "bert-base", "roberta-large")  # 4M to 355M


@dataclass(frozen=True)
class BenchRequest:
    """The options of the command line; None means the default of the part."""

    models: Sequence[str] | None = None
    sizes: Sequence[str] | None = None
    precisions: Sequence[str] | None = None
    device: str = "cuda"
    rounds: int | None = None
    compile_mode: str = "default"

    def grid(self, models: Sequence[str] = MODELS, sizes: Sequence[str] = SIZES) -> Iterator[dict[str, Any]]:
        """Model, batch, length and precision, small sizes first."""
        for model, size, precision in product(
            self.models or models, self.sizes or sizes, self.precisions or PRECISIONS
        ):
            batch, length = map(int, size.split("x"))
            yield {"model": model, "batch": batch, "length": length, "precision": precision}

    def options(self, *, rounds: int, seconds: float | None = None, **settings: Any) -> Any:
        """Options of a measurement; another number of rounds leaves the time of a round as it is."""
        from deltasam.lab.bench.options import StepOptions

        chosen = self.rounds or rounds
        total = None if seconds is None else seconds * chosen / rounds
        return StepOptions(device=self.device, third_party=False, rounds=chosen, seconds=total, **settings)


def figures(request: BenchRequest) -> Iterator[Any]:
    """Every method, eager and captured; memory at the larger size."""
    for shape in request.grid():
        memory = f"{shape['batch']}x{shape['length']}" == (request.sizes or SIZES)[-1]
        methods = METHODS if shape["precision"] == "bf16" else (*METHODS, EXACT)
        yield request.options(
            **shape, methods=methods, ways=("eager", "captured"), rounds=6, seconds=0.6, warmup=1, memory=memory
        )


def eager(request: BenchRequest) -> Iterator[Any]:
    """Eager exact per-instance perturbation and SAM; many rounds, because the host adds noise."""
    for shape in request.grid():
        yield request.options(
            **shape, methods=("per-instance-sam",), ways=("eager",), rounds=11, seconds=3.3, warmup=1, memory=False
        )


def loop(request: BenchRequest) -> Iterator[Any]:
    """Per-instance SAM one instance after the other, as in the paper; the low-rank engine; SAM."""
    methods = ("per-instance-sam", "per-instance-sam-loop")
    for shape in request.grid(models=MODELS[:1]):
        yield request.options(
            **shape, methods=methods, ways=("eager", "captured"), rounds=3, seconds=0.4, warmup=0, memory=False
        )


def compiled(request: BenchRequest) -> Iterator[Any]:
    """Captured SAM with and without torch.compile; each measurement compiles the model again."""
    for shape in request.grid():
        yield request.options(
            **shape, methods=("sam",), ways=("captured", "compiled+captured"), rounds=6, seconds=1.5, warmup=1,
            memory=False, compile_mode=request.compile_mode,
        )  # fmt: skip


def growth(request: BenchRequest) -> Iterator[Any]:
    """Over the number of instances, the number of tokens, and the size of the model."""
    shapes = [("bert-base", n, 64) for n in BATCHES]
    shapes += [("bert-base", 16, t) for t in LENGTHS]
    shapes += [(model, 16, 64) for model in SHAPES]
    for model, batch, length in dict.fromkeys(shapes):
        if model not in (request.models or SHAPES) or (request.sizes and f"{batch}x{length}" not in request.sizes):
            continue
        yield request.options(
            model=model, batch=batch, length=length, precision=(request.precisions or PRECISIONS)[0],
            methods=("delta-sam-ambient", "per-instance-sam"), ways=("eager", "captured"), rounds=4, seconds=0.3,
            warmup=0, memory=True,
        )  # fmt: skip


def cpu(request: BenchRequest) -> Iterator[Any]:
    """Exact per-instance perturbation on a CPU, with the engine and one instance after the other."""
    for model, size in CPU_SHAPES:
        batch, length = map(int, size.split("x"))
        yield request.options(
            model=model, batch=batch, length=length, methods=("per-instance-sam", "per-instance-sam-loop"), rounds=5,
            warmup=1, memory=False,
        )  # fmt: skip


def adamw(request: BenchRequest) -> Iterator[Any]:
    """The implementations of AdamW on a CPU; processor time is less sensitive to other work on the machine."""
    for model, size in product(request.models or ("bert-4x256",), request.sizes or ("4x32", "16x64")):
        batch, length = map(int, size.split("x"))
        yield request.options(
            model=model, batch=batch, length=length, methods=("sam",), adamw=("fused", "foreach", "for-loop"),
            rounds=9, warmup=0, memory=False, clock="cpu", threads=1,
        )  # fmt: skip


PARTS: dict[str, Callable[[BenchRequest], Iterator[Any]]] = {
    "figures": figures, "eager": eager, "loop": loop, "growth": growth, "compiled": compiled, "cpu": cpu,
    "adamw": adamw,
}  # fmt: skip


def candidates_of(part: str, options: Any) -> list[Any] | None:
    """The candidates, if they are not those of the options.

    The loop is not captured, because it is long enough already; one method is enough to see the effect of compiling.
    """
    from deltasam.lab.bench import candidates as named

    only_eager = {"loop": "PerInstanceSAM-loop", "compiled": "ERM"}.get(part)
    if only_eager is None:
        return None
    found = named(options.methods, ways=options.ways, third_party=False, embeddings=True)
    return [each for each in found if each.method != only_eager or each.way == "eager"]


@dataclass(frozen=True)
class Store:
    """The destination of the measurements: files in a folder, or lines of one ``.jsonl`` file."""

    place: Path

    def has(self, name: str) -> bool:
        return (self.place / name).exists()

    def put(self, name: str, record: dict[str, Any]) -> None:
        if self.place.suffix == ".jsonl":
            self.place.parent.mkdir(parents=True, exist_ok=True)
            with self.place.open("a") as file:
                file.write(json.dumps({"name": name, "record": record}, default=str) + "\n")
            return
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2, default=str) + "\n")

    def unpack(self, lines: Path) -> None:
        """Writes the single files of a ``.jsonl`` file."""
        for line in lines.read_text().splitlines():
            self.put(**json.loads(line))


@dataclass(frozen=True)
class Turns:
    """``number`` processes prepare in parallel and then measure one after the other; they meet in a folder.

    Compiling takes a minute of one core, measuring some seconds of the whole GPU: all compile at once, and no
    measurement starts before the last one is ready.
    """

    folder: Path
    number: int
    name: str

    def arrive(self) -> None:
        """Marks this process as ready: it no longer disturbs the others."""
        (self.folder / f"{self.name}.ready").touch()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until all are ready, then for its turn."""
        self.arrive()
        while len(list(self.folder.glob("*.ready"))) < self.number:
            time.sleep(0.1)
        with (self.folder / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def side_by_side(script: str, commands: Sequence[Sequence[str]]) -> None:
    """Runs the script once for each set of arguments, all at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = ["--meet", folder, str(len(commands))]
        running = [
            subprocess.Popen([sys.executable, script, *each, *meeting, str(number)])
            for number, each in enumerate(commands)
        ]
        while any(process.poll() is None for process in running):
            for number, process in enumerate(running):
                if process.poll() is not None:  # finished or killed: the others do not wait for it
                    Turns(Path(folder), len(running), str(number)).arrive()
            time.sleep(0.1)


def run(part: str, options: Any, store: Store, command: str, commit: str | None, turns: Turns | None = None) -> None:
    """Makes one measurement: one file, and one line on the terminal."""
    from deltasam.lab.bench import measure
    from deltasam.lab.bench import report as reports

    name = name_of(options)
    about = {"part": part, "command": command}
    start = time.perf_counter()
    try:
        report = measure(options, candidates_of(part, options), alone=turns.alone if turns else nullcontext)
    except Exception as error:  # noqa: BLE001 - probably out of memory: the others can still be measured
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        store.put(f"{part}/{name}.json", {**about, "options": asdict(options), "failed": why})
        print(f"{part} {name}: failed after {time.perf_counter() - start:.1f} s: {why}", flush=True)
        return
    if commit is not None:
        report = replace(report, machine={**report.machine, "commit": commit})
    store.put(f"{part}/{name}.json", reports.record(report, **about))
    numbers = [f"{row.name} {row.seconds.median * 1e3:.1f}{_memory(row)}" for row in report.rows]
    failed = [f"{each} failed ({why})" for each, why in report.failures.items()]
    engine = "" if report.engine is None else f" [{report.engine}]"
    taken = time.perf_counter() - start
    print(f"{part} {name} ({taken:.1f} s): {', '.join([*numbers, *failed])} ms{engine}", flush=True)


def name_of(options: Any) -> str:
    return f"{options.model}-{options.batch}x{options.length}-{options.precision}"


def _memory(row: Any) -> str:
    return "" if row.peak_bytes is None else f" ({row.peak_bytes / 2**30:.2f} GiB)"


def _without_places(words: Sequence[str]) -> list[str]:
    """The command without the paths of this machine."""
    kept, skip = [], False
    for word in words:
        name = word.partition("=")[0]
        if not skip and name not in ("--out", "--commit"):
            kept.append(word)
        skip = word in ("--out", "--commit")
    return kept


def _single(given: Sequence[str], part: str, each: Any, command: str) -> list[str]:
    """The arguments for one of the measurements; argparse takes the last of repeated options."""
    shape = ["--models", each.model, "--sizes", f"{each.batch}x{each.length}", "--precisions", each.precision]
    kept = [word for word in given if word != "--side-by-side"]
    return [*kept, "--part", part, *shape, "--command", command]


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the measurements of the chosen parts, within the given time."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["figures"])
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="a folder, or one .jsonl file")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="only write the single files of a .jsonl file")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--sizes", nargs="*", metavar="NxT")
    parser.add_argument("--precisions", nargs="*")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile in the part compiled")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement of a part after this time")
    parser.add_argument("--missing", action="store_true", help="skip measurements that exist in --out")
    parser.add_argument("--side-by-side", action="store_true", help="prepare in parallel, measure in turn")
    parser.add_argument("--command", help=argparse.SUPPRESS)
    parser.add_argument("--meet", nargs=3, metavar=("FOLDER", "NUMBER", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="the measured commit, if the sources are not a checkout")
    options = parser.parse_args(given)
    store = Store(options.out)
    if options.unpack is not None:
        store.unpack(options.unpack)
        return
    command = options.command or shlex.join(["python", "benchmarks/speed.py", *_without_places(given)])
    request = BenchRequest(
        options.models, options.sizes, options.precisions, options.device, options.rounds, options.compile_mode
    )
    if options.side_by_side:
        side_by_side(
            __file__, [_single(given, part, each, command) for part in options.part for each in PARTS[part](request)]
        )
        return
    turns = None if options.meet is None else Turns(Path(options.meet[0]), int(options.meet[1]), options.meet[2])
    for part in options.part:
        start = time.perf_counter()
        for each in PARTS[part](request):
            if options.missing and store.has(f"{part}/{name_of(each)}.json"):
                continue
            if time.perf_counter() - start > options.seconds:
                print(f"{part} {name_of(each)}: skipped, out of time", flush=True)
                continue
            run(part, each, store, command, options.commit, turns)
            gc.collect()  # frees what a failed measurement held


if __name__ == "__main__":
    main()
