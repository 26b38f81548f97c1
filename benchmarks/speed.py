"""The figures of the page on speed: every method, eager and captured, on the shapes of BERT-base and RoBERTa-large.

Needs a CUDA device, torch and transformers; weights are random, nothing is downloaded:

    PYTHONPATH=src python benchmarks/speed.py --out results/speed
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path

import torch

from deltasam.bench import report
from deltasam.bench._measure import measure
from deltasam.bench.options import StepOptions

METHODS = ("delta-sam-ambient", "delta-sam-every-4", "per-instance-sam")
SIZES = ((16, 64), (32, 128))
MODELS = ("bert-base", "roberta-large")
PRECISIONS = ("bf16", "tf32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--precisions", nargs="*", default=PRECISIONS)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further measurement after this long")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile (a minute a model)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    ways = ("captured", "compiled+captured") if options.compiled else ("captured",)
    for model in options.models:
        for batch, length in SIZES:
            for precision in options.precisions:
                if time.perf_counter() - start > options.seconds:
                    print(f"left out for want of time: {model} {batch}x{length} {precision}")
                    continue
                path = options.out / f"{model}-{batch}x{length}-{precision}{'-compiled' if options.compiled else ''}.json"
                one = StepOptions(
                    model=model, batch=batch, length=length, precision=precision, ways=ways, methods=METHODS,
                    field=False, rounds=options.rounds, warmup=4, device="cuda", json=path,
                )  # fmt: skip
                result = measure(replace(one, methods=("sam",)) if options.compiled else one)
                report.show(result)
                report.write_json(result, path)
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
