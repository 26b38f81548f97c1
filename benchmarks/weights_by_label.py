"""On which instances do delta-SAM's weights lie? Their rank correlation with the loss, and their mean for each label.

Trains the models of a sweep file (plain training) and takes one step of delta-SAM per batch of training rows, without
dropout, in the weights' own precision. On a GPU or a CPU; the datasets in the folder of ``DELTASAM_DATA``:

    python benchmarks/weights_by_label.py

One file per model in ``results/weights-by-label``; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RHO, ETA, BATCH = 0.01, 1e-4, 32  # those of the sweeps on GLUE
WEIGHTINGS = ("FiniteDifference", "Directional", "OwnGradient", "RandomWeights")


def measure(model: Any, batches: Sequence[Any], objective: Any) -> dict[str, dict[str, Any]]:
    """For every weighting, batch by batch: the correlation with the losses, and the mean weight of every label.

    Weights are scaled to mean 1 in their batch, as they are when they are used.
    """
    import torch
    from scipy.stats import spearmanr

    from deltasam import DeltaSAM
    from deltasam.analysis import WEIGHTINGS as KNOWN

    found: dict[str, dict[str, Any]] = {}
    model.eval()
    for name in WEIGHTINGS:
        method = DeltaSAM(rho=RHO, eta=ETA, weighting=KNOWN[name], seed=0)
        lines: dict[str, Any] = {"with_loss": [], "by_label": {}}
        for batch in batches:
            step = method.backward(model, batch, objective)
            model.zero_grad()
            g = step.weights.double() / step.weights.double().mean()
            lines["with_loss"].append(float(spearmanr(g.cpu(), step.losses.cpu()).statistic))
            for label in torch.unique(batch["labels"]).tolist():
                here = g[batch["labels"] == label]
                lines["by_label"].setdefault(str(label), []).append(float(here.mean()))
        found[name] = lines
        print(f"  {name}: {sum(lines['with_loss']) / len(lines['with_loss']):.2f}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=ROOT / "configs" / "sweeps" / "evidence" / "weights-cola.yaml")
    parser.add_argument("--rows", type=int, default=256, help="a fixed random sample of so many training rows")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "weights-by-label")
    parser.add_argument("--runs", type=Path, default=Path("runs/weights"), help="folder of the trained models")
    parser.add_argument("--models", nargs="+", metavar="LABEL", help="some of the sweep's models")
    options = parser.parse_args(argv)

    import torch
    import transformers

    from deltasam.commit import commit
    from deltasam.experiments import load_run, run
    from deltasam.experiments.sweeps import final_runs, read_sweep
    from deltasam.storage import write_text

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
        batches = [{k: v.to(device) for k, v in batch.items()} for batch in loaded.batches(BATCH)]
        record = {
            "task": result.task, "model": result.model, "method": result.method, "updates": result.steps,
            "metric": result.primary_metric, "value": result.primary_value, "rows": options.rows, "batch": BATCH,
            "rho": RHO, "eta": ETA, "device": result.device, "torch": torch.__version__, "commit": commit(),
            "config": dataclasses.asdict(config.schedule),
            "weightings": measure(loaded.model.to(device), batches, loaded.objective),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
