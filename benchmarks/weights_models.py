"""Trained models to measure delta-SAM's weights on: what the scripts weights_by_label.py and weights_eta.py share."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "configs" / "sweeps" / "evidence"

Measure = Callable[[Any, Sequence[Any], Any], dict[str, Any]]
"""Model, batches, objective -> entries of the record."""


def measure_all(
    argv: Sequence[str] | None, about: str | None, measure: Measure, *, sweep: str, out: str, rows: int, batch: int
) -> None:
    """Trains the models of a sweep file and writes what is measured on each, one file per model.

    Args:
        argv: The command line.
        about: What ``--help`` says.
        measure: What is measured, without dropout.
        sweep: Name of the usual sweep file.
        out: Name of the usual folder below ``results``.
        rows: A fixed random sample of so many training rows.
        batch: Rows of a batch.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=SWEEPS / sweep)
    parser.add_argument("--rows", type=int, default=rows, help="a fixed random sample of so many training rows")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / out)
    parser.add_argument("--runs", type=Path, default=Path("runs/weights"), help="folder of the trained models")
    parser.add_argument("--models", nargs="+", metavar="LABEL", help="some of the sweep's models")
    options = parser.parse_args(argv)

    import torch
    import transformers

    from deltasam.integrations.storage import write_text
    from deltasam.lab.commit import commit
    from deltasam.lab.experiments import load_run, run
    from deltasam.lab.sweeps import final_runs, read_sweep

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = final_runs(read_sweep(options.sweep), {})
    if unknown := set(options.models or ()) - {planned.method for planned in every}:
        parser.error(f"--models {unknown.pop()}: the sweep has {', '.join(planned.method for planned in every)}")
    for planned in every:
        config = planned.config
        path = options.out / f"{config.task.name}-{planned.method}.json"
        if path.is_file() or planned.method not in (options.models or [planned.method]):
            continue
        folder = options.runs / config.run_name
        result = run(config, folder)
        print(f"{path.stem}: {result.primary_metric} {result.primary_value:.3f}", flush=True)
        _, loaded = load_run(folder, split="train", rows=options.rows)
        batches = [{k: v.to(device) for k, v in each.items()} for each in loaded.batches(batch)]
        model = loaded.model.to(device).eval()
        record = {
            "task": result.task, "model": result.model, "method": result.method, "updates": result.steps,
            "metric": result.primary_metric, "value": result.primary_value, "rows": options.rows, "batch": batch,
            "device": result.device, "torch": torch.__version__, "commit": commit(),
            "config": dataclasses.asdict(config.schedule), **measure(model, batches, loaded.objective),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")
