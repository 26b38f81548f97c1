"""The measurements of the speed page, many in one process. Weights are random, nothing is downloaded.

Needs torch and transformers, and a CUDA device for all parts except ``cpu``, ``mlp`` and ``adamw``:

    PYTHONPATH=src python benchmarks/speed.py --side-by-side compiled --budget 420  # all that the page needs, on a GPU
    PYTHONPATH=src python benchmarks/speed.py --part cpu mlp adamw --device cpu
    python -m deltasam.lab.pages  # the tables and figures of docs/speed.md

Every measurement is written to its own file as soon as it is made. A measurement that fails is recorded, and the rest
continues. ``--side-by-side`` prepares (compiles) the measurements of a part at the same time, each in its own process,
and then makes them one after the other. ``--baseline SRC`` makes every measurement also with the sources of another
version, each in its own process, and prints both; its files go to a folder next to ``--out``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speed_parts import DEFAULT, PARTS, BenchRequest, candidates_of
from speed_turns import Turns, side_by_side


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


def both(words: Sequence[str], out: Path, name: str, baseline: Path) -> None:
    """Makes a measurement with these sources and with the others, and prints the time of each step."""
    folders = {Path(__file__).parents[1] / "src": out, baseline: out.with_name(f"{out.name}-baseline")}
    for source, folder in folders.items():
        own = {"PYTHONPATH": str(source), **({"DELTASAM_COMMIT": "baseline"} if source == baseline else {})}
        subprocess.run(
            [sys.executable, __file__, *words, "--out", str(folder)], env={**os.environ, **own}, check=False
        )
    here, there = (
        {
            row["name"]: row["seconds"]["median"] * 1e3
            for row in json.loads((folder / name).read_text()).get("rows", [])
        }
        for folder in folders.values()
    )
    for step in (step for step in here if step in there):
        print(f"  {step}: {there[step]:.1f} -> {here[step]:.1f} ms ({here[step] / there[step]:.2f})", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the measurements of the chosen parts, within the given time."""
    began = time.perf_counter()
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=DEFAULT, help="default: those for a GPU, in order")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the files")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--sizes", nargs="*", metavar="NxT")
    parser.add_argument("--precisions", nargs="*")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--compile-mode", default="tuned", help="mode of torch.compile in the part compiled")
    parser.add_argument("--budget", type=float, default=1e9, help="start no measurement after this many seconds")
    parser.add_argument("--missing", action="store_true", help="skip measurements that exist in --out")
    parser.add_argument(
        "--side-by-side", nargs="*", choices=PARTS, metavar="PART", help="prepare these parts (or all) in parallel"
    )
    parser.add_argument("--baseline", type=Path, metavar="SRC", help="also measure the sources in this folder")
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
    in_parallel = () if options.side_by_side is None or turns else options.side_by_side or options.part
    for part in options.part:
        single: list[list[str]] = []  # the arguments of the measurements that are prepared side by side
        for each in PARTS[part](request):
            size = f"{each.batch}x{each.length}"
            path = options.out / part / f"{each.model}-{size}-{each.precision}.json"
            # argparse takes the last of repeated options
            words = [*given, "--part", part, "--models", each.model, "--sizes", size, "--precisions", each.precision]
            words += ["--command", command]
            if options.missing and path.exists():
                continue
            if time.perf_counter() - began > options.budget:
                print(f"{part} {path.stem}: skipped, out of time", flush=True)
            elif part in in_parallel:
                single.append(words)
            elif options.baseline is not None:
                kept = [word for word in words if word not in ("--baseline", str(options.baseline))]
                both(kept, options.out, f"{part}/{path.name}", options.baseline)
            else:
                run(part, each, path, command, turns)
                gc.collect()  # frees what a failed measurement held
        if single:
            side_by_side(__file__, single)


if __name__ == "__main__":
    main()
