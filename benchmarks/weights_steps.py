"""Takes steps of delta-SAM on trained models and records the weights of the instances.

Trains the models of a sweep file, then takes steps on batches of training rows, without dropout, in the precision of
the weights. On a GPU or a CPU; the datasets are in the folder ``DELTASAM_DATA``:

    python benchmarks/weights_steps.py labels  # which instances get the weight: by loss and by label
    python benchmarks/weights_steps.py eta     # how often eta is reached, and what it does to the update
    python benchmarks/weights_steps.py eta --sweep configs/sweeps/evidence/weights-cola.yaml

Writes one file per model to ``results/weights-by-label`` or ``results/weights-eta``; existing files are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SWEEPS = ROOT / "configs" / "sweeps" / "evidence"
BATCH = 32
RHO, ETA = 0.01, 1e-4  # of the sweeps on GLUE
WEIGHTINGS = ("FiniteDifference", "Directional", "OwnGradient", "RandomWeights")
RADII, ETAS = (0.01, 0.02, 0.05), (1e-4, 2e-4, 5e-4, 1e-3)  # the paper's grid for GLUE
NO_FLOOR = 1e-30


def by_label(model: Any, batches: Sequence[Any], objective: Any) -> dict[str, Any]:
    """Rank correlation of the weights with the losses, and the mean weight of every label, by weighting and batch.

    Weights are scaled to mean 1 in their batch, as delta-SAM uses them.
    """
    import torch
    from scipy.stats import spearmanr

    from deltasam import DeltaSAM
    from deltasam.analysis import WEIGHTINGS as KNOWN

    found: dict[str, dict[str, Any]] = {}
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
    return {"rho": RHO, "eta": ETA, "weightings": found}


def by_eta(model: Any, batches: Sequence[Any], objective: Any) -> dict[str, Any]:
    """How often the denominator is eta, and the cosine of the update with the one at the smallest eta, by batch.

    ``floor`` is the share of the instances whose denominator is eta, among those that have a weight: in float32 the
    second difference of some is 0. All steps of a batch use the same random direction.
    """
    found: dict[str, Any] = {}
    for rho in RADII:
        lines: dict[str, dict[str, list[float]]] = {f"{eta:g}": {"floor": [], "cosine": []} for eta in ETAS}
        for batch in batches:
            free, _ = step_at(model, batch, objective, rho, NO_FLOOR)
            first = None
            for eta in ETAS:
                g, update = step_at(model, batch, objective, rho, eta)
                first = update if first is None else first
                weighted = free > 0
                at_floor = g[weighted] < 0.999 * free[weighted]  # the same passes: otherwise equal up to rounding
                lines[f"{eta:g}"]["floor"].append(float(at_floor.double().mean()))
                lines[f"{eta:g}"]["cosine"].append(float(first @ update / (first.norm() * update.norm())))
        found[f"{rho:g}"] = lines
        shown = {eta: round(sum(at["floor"]) / len(at["floor"]), 2) for eta, at in lines.items()}
        print(f"  rho {rho:g}, at the floor: {shown}", flush=True)
    return {"eta": found}


def step_at(model: Any, batch: Any, objective: Any, rho: float, eta: float) -> tuple[Any, Any]:
    """The weights of the instances, and the update as one vector in float64."""
    import torch

    from deltasam import DeltaSAM

    weights = DeltaSAM(rho=rho, eta=eta, seed=0).backward(model, batch, objective).weights
    update = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return weights, update


MEASUREMENTS: dict[str, tuple[Callable[..., dict[str, Any]], str, str, int]] = {
    "labels": (by_label, "weights-cola.yaml", "weights-by-label", 256),
    "eta": (by_eta, "weights.yaml", "weights-eta", 128),
}
"""Name -> function, default sweep, default folder in ``results``, training rows."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the models of the sweep and writes what is measured on each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--rows", type=int, help="size of the fixed random sample of training rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/weights"), help="folder of the trained models")
    parser.add_argument("--models", nargs="+", metavar="LABEL", help="some of the models of the sweep")
    options = parser.parse_args(argv)
    measure, sweep, out, rows = MEASUREMENTS[options.measurement]
    rows = options.rows or rows

    import torch
    import transformers

    from deltasam.integrations.storage import write_text
    from deltasam.lab.commit import commit
    from deltasam.lab.experiments import load_run, run
    from deltasam.lab.sweeps import final_runs, read_sweep

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = final_runs(read_sweep(options.sweep or SWEEPS / sweep), {})
    if unknown := set(options.models or ()) - {planned.method for planned in every}:
        parser.error(f"--models {unknown.pop()}: the sweep has {', '.join(planned.method for planned in every)}")
    for planned in every:
        config = planned.config
        path = (options.out or ROOT / "results" / out) / f"{config.task.name}-{planned.method}.json"
        if path.is_file() or planned.method not in (options.models or [planned.method]):
            continue
        folder = options.runs / config.run_name
        result = run(config, folder)
        print(f"{path.stem}: {result.primary_metric} {result.primary_value:.3f}", flush=True)
        _, loaded = load_run(folder, split="train", rows=rows)
        batches = [{k: v.to(device) for k, v in each.items()} for each in loaded.batches(BATCH)]
        model = loaded.model.to(device).eval()
        record = {
            "task": result.task, "model": result.model, "method": result.method, "updates": result.steps,
            "metric": result.primary_metric, "value": result.primary_value, "rows": rows, "batch": BATCH,
            "device": result.device, "torch": torch.__version__, "commit": commit(),
            "config": dataclasses.asdict(config.schedule), **measure(model, batches, loaded.objective),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
