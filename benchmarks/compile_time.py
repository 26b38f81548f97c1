"""How long compiling takes, and what tuning the kernels is worth: ``compiled(model)`` with and without it.

    PYTHONPATH=src python benchmarks/compile_time.py --model bert-base --size 16x64 --precision bf16

Needs torch and transformers. Every method is compiled with and without ``coordinate_descent_tuning``, each in its own
process with an empty cache, all at the same time; then the captured steps are timed one after the other. Plain
training and SAM compile the same graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from speed_turns import Turns, side_by_side

from deltasam.lab.bench._workbench import Workbench, set_up
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.catalogue import find_method
from deltasam.lab.commit import commit
from deltasam.speed.capture import Captured
from deltasam.speed.compiling import compiled

PREPARING = 4  # steps: ordinary, recorded, replayed
KINDS = {"tuned": True, "untuned": False}


def compile_step(bench: Workbench, method: str, *, tuned: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Compiles the model in one eager step; returns the seconds, the number of kernels, and a captured step."""
    from torch._inductor import metrics

    taken = find_method(method)()
    bench.synchronize()
    start = time.perf_counter()
    model = compiled(bench.model, dynamic=False, coordinate_descent_tuning=tuned)
    with bench.precision():
        taken.backward(model, bench.batch, bench.objective)
    bench.synchronize()
    seconds = time.perf_counter() - start
    captured = Captured(taken)

    def step() -> None:
        bench.model.zero_grad()
        with bench.precision():
            captured.backward(model, bench.batch, bench.objective)
        bench.synchronize()

    for _ in range(PREPARING):
        step()
    facts = {"compile_seconds": seconds, "kernels": metrics.generated_kernel_count}
    return {**facts, "captured": captured.report.replayed > 0}, step


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every method both ways, or one of them as a process of that."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--size", default="16x64", metavar="NxT")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--methods", nargs="+", default=["erm", "per-instance-sam"])
    parser.add_argument("--rounds", type=int, default=50, help="timed steps")
    parser.add_argument("--out", type=Path, default=Path("results/speed/compile-time"), help="folder of the files")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--meet", nargs=3, metavar=("FOLDER", "NUMBER", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.one is None:
        side_by_side(__file__, [[*given, "--one", method, kind] for method in options.methods for kind in KINDS])
        return
    method, kind = options.one
    turns = Turns(Path(options.meet[0]), int(options.meet[1]), options.meet[2])
    batch, length = map(int, options.size.split("x"))
    shape = StepOptions(
        model=options.model, batch=batch, length=length, precision=options.precision, device=options.device
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        bench = set_up(shape)
        found, step = compile_step(bench, method, tuned=KINDS[kind])
    with turns.alone():
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    found["step_seconds"] = statistics.median(seconds)
    print(f"{method} {kind}: {found}", flush=True)
    own = given[: given.index("--one")]
    shown = [word for word in own if word not in ("--out", str(options.out))]
    record = {
        "part": "compile-time", "command": shlex.join(["python", "benchmarks/compile_time.py", *shown]),
        "options": {"model": options.model, "size": options.size, "precision": options.precision},
        "method": method, "tuned": KINDS[kind], **found,
        "machine": {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
            "torch": torch.__version__, "commit": commit(),
        },
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{options.model}-{options.size}-{options.precision}-{method}-{kind}.json"
    (options.out / name).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
