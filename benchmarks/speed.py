"""The figures of the page on speed: every method, eager and captured, on the shapes of BERT-base and RoBERTa-large.

Needs a CUDA device, torch and transformers; weights are random, nothing is downloaded. Each measurement is a process
of its own, so that no graph of the last one holds memory:

    PYTHONPATH=src python benchmarks/speed.py --out results/speed
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

METHODS = ("delta-sam-ambient", "delta-sam-every-4", "per-instance-sam")
SIZES = ((16, 64), (32, 128))


def measure(model: str, size: tuple[int, int], precision: str, rounds: int, compiled: bool, out: Path) -> None:
    """One measurement, to one file."""
    batch, length = size
    name = f"{model}-{batch}x{length}-{precision}{'-compiled' if compiled else ''}.json"
    ways = ("captured", "compiled+captured") if compiled else ("eager", "captured")
    methods = ("sam",) if compiled else METHODS
    options = {"model": model, "batch": batch, "length": length, "precision": precision, "rounds": rounds}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "deltasam.bench.step", *arguments, f"--json={out / name}", "--warmup=3"]
    command += ["--no-field", "--device=cuda", "--memory" if size == SIZES[1] else "--no-memory"]
    subprocess.run([*command, "--ways", *ways, "--methods", *methods], check=True)


def main() -> None:
    """Measures the whole grid, or as much of it as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--models", nargs="*", default=["bert-base", "roberta-large"])
    parser.add_argument("--precisions", nargs="*", default=["bf16", "tf32"])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="SAM with torch.compile instead, a minute each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for model, size, precision in product(options.models, SIZES, options.precisions):
        if time.perf_counter() - start > options.seconds:
            print(f"left out for want of time: {model} {size[0]}x{size[1]} {precision}")
            continue
        measure(model, size, precision, options.rounds, options.compiled, options.out)


if __name__ == "__main__":
    main()
