"""The measurements of the speed page, many in one process. Weights are random, nothing is downloaded.

Needs torch and transformers, and a CUDA device for all parts except ``cpu`` and ``adamw``:

    PYTHONPATH=src python benchmarks/speed.py --part figures eager loop growth compiled
    PYTHONPATH=src python benchmarks/speed.py --part cpu adamw --device cpu
    python -m deltasam.lab.pages  # the tables and figures of docs/speed.md

Every measurement is written to its own file as soon as it is made. A measurement that fails is recorded, and the rest
continues. ``--side-by-side`` prepares (compiles) all measurements at the same time, each in its own process, and then
makes them one after the other.
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
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

MODELS = ("bert-base", "roberta-large")
SIZES = ("16x64", "32x128")
PRECISIONS = ("bf16", "tf32")
METHODS = ("delta-sam-ambient", "delta-sam-every-4", "per-instance-sam")
EXACT = "per-instance-sam-exact"  # under autocast it would be the same as per-instance-sam
LOOP = ("per-instance-sam", "per-instance-sam-loop")
GROWING = ("bert-2x128", "bert-4x256", "bert-4x512", "bert-8x512", "bert-base", "roberta-large")  # 4M to 355M
GROWTH = [
    *(("bert-base", f"{n}x64") for n in (8, 16, 32, 64, 128)),
    *(("bert-base", f"16x{t}") for t in (32, 64, 128, 256, 512)),
    *((model, "16x64") for model in GROWING),
]


@dataclass(frozen=True)
class BenchRequest:
    """The options of the command line; None means the default of the part."""

    models: Sequence[str] | None = None
    sizes: Sequence[str] | None = None
    precisions: Sequence[str] | None = None
    device: str = "cuda"
    rounds: int | None = None
    compile_mode: str = "default"

    def grid(self, models: Sequence[str] = MODELS, sizes: Sequence[str] = SIZES) -> Iterator[tuple[str, str]]:
        """Models and sizes, small sizes first."""
        return product(self.models or models, self.sizes or sizes)

    def plan(self, shapes: Any, *, rounds: int, seconds: float | None = None, **settings: Any) -> Iterator[Any]:
        """Options of the measurements; another number of rounds leaves the time of a round as it is."""
        from deltasam.lab.bench.options import StepOptions

        chosen = self.rounds or rounds
        total = None if seconds is None else seconds * chosen / rounds
        precisions = settings.pop("precisions", self.precisions or PRECISIONS)
        for (model, size), precision in product(shapes, precisions):
            batch, length = map(int, size.split("x"))
            yield StepOptions(
                device=self.device, third_party=False, rounds=chosen, seconds=total, model=model, batch=batch,
                length=length, precision=precision, **settings,
            )  # fmt: skip


def figures(request: BenchRequest) -> Iterator[Any]:
    """Every method, eager and captured; memory at the larger size."""
    for shape, precision in product(request.grid(), request.precisions or PRECISIONS):
        methods = METHODS if precision == "bf16" else (*METHODS, EXACT)
        memory = shape[1] == (request.sizes or SIZES)[-1]
        yield from request.plan(
            [shape], precisions=[precision], methods=methods, ways=("eager", "captured"), rounds=6, seconds=0.6,
            warmup=1, memory=memory,
        )  # fmt: skip


def eager(request: BenchRequest) -> Iterator[Any]:
    """Eager exact per-instance perturbation and SAM; many rounds, because the host adds noise."""
    return request.plan(
        request.grid(), methods=LOOP[:1], ways=("eager",), rounds=11, seconds=3.3, warmup=1, memory=False
    )


def loop(request: BenchRequest) -> Iterator[Any]:
    """Per-instance SAM one instance after the other, as in the paper; the low-rank engine; SAM."""
    shapes = request.grid(models=MODELS[:1])
    return request.plan(
        shapes, methods=LOOP, ways=("eager", "captured"), rounds=3, seconds=0.4, warmup=0, memory=False
    )


def compiled(request: BenchRequest) -> Iterator[Any]:
    """Captured SAM with and without torch.compile; each measurement compiles the model again."""
    return request.plan(
        request.grid(), methods=("sam",), ways=("captured", "compiled+captured"), rounds=6, seconds=1.5, warmup=1,
        memory=False, compile_mode=request.compile_mode,
    )  # fmt: skip


def growth(request: BenchRequest) -> Iterator[Any]:
    """Over the number of instances, the number of tokens, and the size of the model."""
    wanted = [
        (model, size) for model, size in dict.fromkeys(GROWTH)
        if model in (request.models or GROWING) and size in (request.sizes or [size])
    ]  # fmt: skip
    return request.plan(
        wanted, precisions=(request.precisions or PRECISIONS)[:1], methods=(METHODS[0], LOOP[0]),
        ways=("eager", "captured"), rounds=4, seconds=0.3, warmup=0, memory=True,
    )  # fmt: skip


def cpu(request: BenchRequest) -> Iterator[Any]:
    """Exact per-instance perturbation on a CPU, with the engine and one instance after the other."""
    shapes = (("bert-4x256", "16x64"), ("bert-2x768", "8x128"), ("bert-2x768", "16x64"))
    return request.plan(shapes, precisions=["fp32"], methods=LOOP, rounds=5, warmup=1, memory=False)


def adamw(request: BenchRequest) -> Iterator[Any]:
    """The implementations of AdamW on a CPU; processor time is less sensitive to other work on the machine."""
    return request.plan(
        request.grid(["bert-4x256"], ["4x32", "16x64"]), precisions=["fp32"], methods=("sam",),
        adamw=("fused", "foreach", "for-loop"), rounds=9, warmup=0, memory=False, clock="cpu", threads=1,
    )  # fmt: skip


PARTS: dict[str, Callable[[BenchRequest], Iterator[Any]]] = {
    "figures": figures, "eager": eager, "loop": loop, "growth": growth, "compiled": compiled, "cpu": cpu,
    "adamw": adamw,
}  # fmt: skip


def candidates_of(part: str, options: Any) -> list[Any] | None:
    """The candidates, if they are not those of the options.

    The loop is not captured, because it is long enough already; one method is enough to see the effect of compiling.
    """
    from deltasam.lab.bench import candidates

    only_eager = {"loop": "PerInstanceSAM-loop", "compiled": "ERM"}.get(part)
    if only_eager is None:
        return None
    found = candidates(options.methods, ways=options.ways, third_party=False, embeddings=True)
    return [each for each in found if each.method != only_eager or each.way == "eager"]


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


def run(part: str, options: Any, path: Path, command: str, turns: Turns | None = None) -> None:
    """Makes one measurement: one file, and one line on the terminal."""
    from deltasam.lab.bench import measure
    from deltasam.lab.bench import report as reports

    start = time.perf_counter()
    record: dict[str, Any] = {"part": part, "command": command}
    try:
        report = measure(options, candidates_of(part, options), alone=turns.alone if turns else nullcontext)
    except Exception as error:  # noqa: BLE001 - probably out of memory: the others can still be measured
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        record |= {"options": asdict(options), "failed": why}
        outcome = f"failed: {why}"
    else:
        record = reports.record(report, **record)
        numbers = [f"{row.name} {row.seconds.median * 1e3:.1f} ms{_memory(row)}" for row in report.rows]
        failed = [f"{each} failed ({why})" for each, why in report.failures.items()]
        outcome = ", ".join([*numbers, *failed])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, default=str) + "\n")
    print(f"{part} {path.stem} ({time.perf_counter() - start:.1f} s): {outcome}", flush=True)


def _memory(row: Any) -> str:
    return "" if row.peak_bytes is None else f" ({row.peak_bytes / 2**30:.2f} GiB)"


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the measurements of the chosen parts, within the given time."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["figures"])
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the files")
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
    options = parser.parse_args(given)
    place = str(options.out)  # a path of this machine, which is not recorded
    shown = [word for word in given if word not in ("--out", place, f"--out={place}")]
    command = options.command or shlex.join(["python", "benchmarks/speed.py", *shown])
    request = BenchRequest(
        options.models, options.sizes, options.precisions, options.device, options.rounds, options.compile_mode
    )
    turns = None if options.meet is None else Turns(Path(options.meet[0]), int(options.meet[1]), options.meet[2])
    single: list[list[str]] = []  # the arguments for each of the measurements
    for part in options.part:
        start = time.perf_counter()
        for each in PARTS[part](request):
            size = f"{each.batch}x{each.length}"
            path = options.out / part / f"{each.model}-{size}-{each.precision}.json"
            if options.missing and path.exists():
                continue
            if options.side_by_side:  # argparse takes the last of repeated options
                shape = ["--models", each.model, "--sizes", size, "--precisions", each.precision]
                kept = [word for word in given if word != "--side-by-side"]
                single.append([*kept, "--part", part, *shape, "--command", command])
            elif time.perf_counter() - start > options.seconds:
                print(f"{part} {path.stem}: skipped, out of time", flush=True)
            else:
                run(part, each, path, command, turns)
                gc.collect()  # frees what a failed measurement held
    if single:
        side_by_side(__file__, single)


if __name__ == "__main__":
    main()
