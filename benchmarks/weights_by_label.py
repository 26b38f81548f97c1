"""On which instances do delta-SAM's weights lie? Their rank correlation with the loss, and their mean for each label.

Trains the models of a sweep file (plain training) and takes one step of delta-SAM per batch of training rows, without
dropout, in the weights' own precision. On a GPU or a CPU; the datasets in the folder of ``DELTASAM_DATA``:

    python benchmarks/weights_by_label.py

One file per model in ``results/weights-by-label``; what is there is not measured again.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

models = runpy.run_path(str(Path(__file__).with_name("weights_models.py")))
RHO, ETA, BATCH = 0.01, 1e-4, 32  # those of the sweeps on GLUE
WEIGHTINGS = ("FiniteDifference", "Directional", "OwnGradient", "RandomWeights")


def measure(model: Any, batches: Sequence[Any], objective: Any) -> dict[str, Any]:
    """For every weighting, batch by batch: the correlation with the losses, and the mean weight of every label.

    Weights are scaled to mean 1 in their batch, as they are when they are used.
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


if __name__ == "__main__":
    models["measure_all"](
        None, __doc__, measure, sweep="weights-cola.yaml", out="weights-by-label", rows=256, batch=BATCH
    )
