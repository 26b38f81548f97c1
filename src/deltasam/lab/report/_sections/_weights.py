"""Instance weights g: during training, at the end, and the instances with the largest and smallest ones."""

from __future__ import annotations

from deltasam.lab.report._figures import axes, draw_line
from deltasam.lab.report._measured import WEIGHTS
from deltasam.lab.report._names import method_name
from deltasam.lab.report._sections._base import PageRuns, Section
from deltasam.lab.report._sections._curves import curves


def weights(runs: PageRuns) -> Section | None:
    """Curves from the logs; distributions and examples where ``deltasam analyze examples`` measured them."""
    import pandas as pd

    logged = {
        "weights_mean": "mean of g in a batch",
        "weights_std": "standard deviation of g",
        "weights_max": "largest g in a batch",
    }
    figures = curves(runs, logged, title="Weights g in training")
    rows = []
    for (task, model), methods in runs.setups.items():
        for method, found in methods.items():
            for run in found:
                measured = run.measured(WEIGHTS) or {"weights": [], "examples": []}
                for example in measured["examples"]:
                    row = {"text": str(example["text"]), "g": f"{example['weight']:.4g}", "rank": int(example["rank"])}
                    rows.append({**row, "task": run.task, "method": method_name(method), "seed": run.seed})
                if measured["weights"]:
                    (ax,) = axes()
                    count = len(measured["weights"])
                    draw_line(ax, method, [(k + 0.5) / count for k in range(count)], measured["weights"])
                    ax.set_xlabel("share of the instances with at most this weight")
                    ax.set_ylabel("g")
                    title = f"Weights g at the end: {task}, {model}, {method_name(method)}, seed {run.seed}"
                    figures.append((title, ax.figure))
    if not figures and not rows:
        return None
    frame = pd.DataFrame(rows) if rows else None
    return Section(name="weights", title="Instance weights", figures=figures, frame=frame)
