"""Does eta, the floor of the denominator of Eq. 5, matter? How often it is reached, and what it does to the update.

Trains the models of a sweep file and takes steps of delta-SAM at every rho and eta of the paper's grid for GLUE, with
the same random direction, without dropout, in the weights' own precision. On a GPU or a CPU; the datasets in the
folder of ``DELTASAM_DATA``:

    python benchmarks/weights_eta.py
    python benchmarks/weights_eta.py --sweep configs/sweeps/evidence/weights-cola.yaml

One file per model in ``results/weights-eta``; what is there is not measured again.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

models = runpy.run_path(str(Path(__file__).with_name("weights_models.py")))
RADII, ETAS = (0.01, 0.02, 0.05), (1e-4, 2e-4, 5e-4, 1e-3)
NO_FLOOR = 1e-30


def measure(model: Any, batches: Sequence[Any], objective: Any) -> dict[str, Any]:
    """For every rho and eta, batch by batch.

    ``floor`` is the share of the instances whose denominator is eta, of those that have a weight at all: in float32
    the second difference of some is 0. ``cosine`` is that of the update with the update at the smallest eta, whose
    scale does not matter, since the perturbation is scaled to rho.
    """
    found: dict[str, Any] = {}
    for rho in RADII:
        lines: dict[str, dict[str, list[float]]] = {f"{eta:g}": {"floor": [], "cosine": []} for eta in ETAS}
        for batch in batches:
            free, _ = step(model, batch, objective, rho, NO_FLOOR)
            first = None
            for eta in ETAS:
                g, update = step(model, batch, objective, rho, eta)
                first = update if first is None else first
                weighted = free > 0
                at_floor = g[weighted] < 0.999 * free[weighted]  # the same passes: equal but for rounding elsewhere
                lines[f"{eta:g}"]["floor"].append(float(at_floor.double().mean()))
                lines[f"{eta:g}"]["cosine"].append(float(first @ update / (first.norm() * update.norm())))
        found[f"{rho:g}"] = lines
        shown = {eta: round(sum(at["floor"]) / len(at["floor"]), 2) for eta, at in lines.items()}
        print(f"  rho {rho:g}, at the floor: {shown}", flush=True)
    return {"eta": found}


def step(model: Any, batch: Any, objective: Any, rho: float, eta: float) -> tuple[Any, Any]:
    """The weights of the instances, and the update as one vector in float64."""
    import torch

    from deltasam import DeltaSAM

    weights = DeltaSAM(rho=rho, eta=eta, seed=0).backward(model, batch, objective).weights
    update = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return weights, update


if __name__ == "__main__":
    models["measure_all"](None, __doc__, measure, sweep="weights.yaml", out="weights-eta", rows=128, batch=32)
