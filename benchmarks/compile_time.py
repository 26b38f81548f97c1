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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from one_shape import name_of, parser_of, record_of, shape_of
from speed_turns import Turns, side_by_side

from deltasam.lab.bench import Candidate, prepared
from deltasam.lab.catalogue import find_method
from deltasam.speed.capture import Captured
from deltasam.speed.compiling import compiled

PREPARING = 4  # steps: ordinary, recorded, replayed
KINDS = {"tuned": True, "untuned": False}


def candidate(method: str, found: dict[str, Any], *, tuned: bool) -> Candidate:
    """A captured step, without an optimizer; ``found`` gets the seconds that compiling takes, and the kernels."""

    def build(bench: Any, _: Any) -> Callable[[], None]:
        from torch._inductor import metrics

        captured = Captured(find_method(method)())
        model = compiled(bench.model, dynamic=False, coordinate_descent_tuning=tuned)

        def step() -> None:
            bench.model.zero_grad()
            with bench.precision():
                captured.backward(model, bench.batch, bench.objective)
            bench.synchronize()

        bench.synchronize()
        start = time.perf_counter()
        step()
        found.update(compile_seconds=time.perf_counter() - start, kernels=metrics.generated_kernel_count)
        return step

    return Candidate(method, "deltasam", build, first_steps=PREPARING)


def timed(step: Callable[[], None]) -> float:
    """The seconds of a step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every method both ways, or one of them as a process of that."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(__doc__)
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
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for _, step in prepared(shape_of(options), [candidate(method, found, tuned=KINDS[kind])]):
            with turns.alone():
                found["step_seconds"] = statistics.median(timed(step) for _ in range(options.rounds))
    print(f"{method} {kind}: {found}", flush=True)
    origin = record_of("compile-time", "compile_time.py", given[: given.index("--one")], options)
    record = {**origin, "method": method, "tuned": KINDS[kind], **found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name_of(options)}-{method}-{kind}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
