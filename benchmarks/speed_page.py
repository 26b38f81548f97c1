"""Writes docs/speed.md from the measurements in results/speed. Run it after ``benchmarks/speed.py``:

python benchmarks/speed_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "results" / "speed"

INTRODUCTION = """# Speed

<!-- written by benchmarks/speed_page.py from results/speed; edit that, not this -->

Eager fine-tuning of a base-sized model on a fast GPU waits for the host to launch kernels.
`deltasam.capture.Captured` records the whole step (all passes, perturbation, way back, and the optimizer if you hand
it over) as one CUDA graph per batch shape and replays it:

```python
import torch
from deltasam import Classification, DeltaSAM
from deltasam.capture import Captured

model = torch.nn.Linear(4, 3)  # your model, on the GPU
batch = (torch.randn(8, 4), torch.randint(3, (8,)))
method = Captured(DeltaSAM(rho=0.05))  # use it like the method itself
method.backward(model, batch, Classification())
```

The first batch of a shape takes an ordinary step, the second is recorded, the others are replayed. Keep shapes few
with `PadToBuckets`. Dropout is new in every step and the same in all passes of a step; gradients equal the eager ones
to rounding (`make test-gpu`). A model that cannot be recorded runs eagerly, and a warning names the operation. On the
CPU nothing is captured.

## Measured

Random weights, dropout 0.1, AdamW included; median of the rounds of one process, ratios within it. `DeltaSAM-ambient`
probes in the precision of the other passes (two extra forwards); by default the probes run in float32, and under
autocast a third one with them. `DeltaSAM-every-4` is the same with `probe_every=4`.

These times were taken around commit 2f5fb86, before the core learnt of several processes and before the last work on
the eager per-instance engine; only these shapes were measured so far, few rounds each. Eager times depend on the host
(ERM took 37 to 112 ms in three processes on the same kind of machine): trust the ratios of captured steps more.
"""

FIGURES = (
    ("captured SAM / (2 x captured ERM)", lambda t: t["SAM captured"] / (2 * t["ERM captured"])),
    ("captured delta-SAM / captured SAM", lambda t: t["DeltaSAM-ambient captured"] / t["SAM captured"]),
    ("the same with `probe_every=4`", lambda t: t["DeltaSAM-every-4 captured"] / t["SAM captured"]),
    ("captured exact per-instance / captured SAM", lambda t: t["PerInstanceSAM captured"] / t["SAM captured"]),
    ("captured delta-SAM / eager ERM", lambda t: t["DeltaSAM-ambient captured"] / t["ERM"]),
    ("eager exact per-instance / eager SAM", lambda t: t["PerInstanceSAM"] / t["SAM"]),
    ("captured + compiled SAM / captured SAM", lambda t: t["SAM compiled+captured"] / t["SAM captured"]),
)


def title(result: dict[str, Any]) -> str:
    options, machine = result["options"], result["machine"]
    shape = f"{options['model']} ({int(machine['parameters']) / 1e6:.0f}M), {options['batch']} x {options['length']}"
    return f"{shape}, {options['precision']}, {machine['device']}, torch {machine['torch']}"


def table(result: dict[str, Any]) -> str:
    lines = ["| step | ms | x eager ERM | x eager SAM | passes |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        passes = "" if row["forwards"] is None else f"{row['forwards']:g}/{row['backwards']:g}"
        ratios = " | ".join(f"{row[key]['median']:.2f}" for key in ("times_erm", "times_sam"))
        lines.append(f"| {row['name']} | {row['seconds']['median'] * 1e3:.1f} | {ratios} | {passes} |")
    return "\n".join(lines)


def figures(results: list[dict[str, Any]]) -> str:
    shapes = [(r["options"]["model"], r["options"]["batch"], r["options"]["length"]) for r in results]
    head = [
        f"{model} {batch}x{length} {r['options']['precision']}"
        for (model, batch, length), r in zip(shapes, results, strict=True)
    ]
    lines = ["| ratio | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for name, ratio in FIGURES:
        cells = []
        for result in results:
            seconds = {row["name"]: row["seconds"]["median"] for row in result["rows"]}
            try:
                cells.append(f"{ratio(seconds):.2f}")
            except KeyError:
                cells.append("-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    parts = [INTRODUCTION]
    row = "### Steps in a row, as in training\n\n`PYTHONPATH=src python benchmarks/speed.py --out results/speed`"
    single = (
        "### One step at a time\n\nThe host waits for the device after every step, so its own work is in these times; "
        "an earlier form of the command. Passes and memory of the captured rows, which it got wrong, are left out."
    )
    folders = ((RESULTS, row), (RESULTS / "one-step", single))
    for folder, heading in folders:
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        if results:
            parts += [heading, figures(results)]
            parts += [f"<details><summary>{title(r)}</summary>\n\n{table(r)}\n\n</details>" for r in results]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
