"""Writes docs/speed.md and its plots from the measurements in results/speed. Run it after ``benchmarks/speed.py``:

python benchmarks/speed_page.py
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
PLOTS = ROOT / "docs" / "_static" / "speed"
RESULTS = ROOT / "results" / "speed"
parts = runpy.run_path(str(ROOT / "benchmarks" / "speed_parts.py"))

Result = dict[str, Any]

INTRODUCTION = """# Speed

<!-- written by benchmarks/speed_page.py from results/speed; edit that, not this -->

Eager fine-tuning of a base-sized model on a fast GPU waits for the host to launch kernels.
`deltasam.speed.capture.Captured` records the whole step (all passes, perturbation, way back, and the optimizer if you hand
it over) as one CUDA graph per batch shape and replays it:

```python
import torch
from deltasam import Classification, DeltaSAM
from deltasam.speed.capture import Captured

model = torch.nn.Linear(4, 3)  # your model, on the GPU
batch = (torch.randn(8, 4), torch.randint(3, (8,)))
method = Captured(DeltaSAM(rho=0.05))  # use it like the method itself
method.backward(model, batch, Classification())
```

The first batch of a shape takes an ordinary step, the second is recorded, the others are replayed. Keep shapes few
with `PadToBuckets`. Dropout is new in every step and the same in all passes of a step; gradients equal the eager ones
to rounding (`make test-gpu`). A model that cannot be recorded runs eagerly, and a warning names the operation. On the
CPU nothing is captured.

Give your batches an attention mask: without one transformers makes it while the graph is recorded but not in an
ordinary step, and takes another attention kernel, whose dropout masks are others (the passes of a step still share
them). The probes of delta-SAM are branches of the graph beside the pass at w: a small batch does not fill the GPU, and
then they cost less than the third that their FLOPs are. For the while the weights at w - r lie beside those at w + r.
The move to w + eps is one kernel for all parameters (`deltasam.step.fused`, by Triton; torch's own where there is none).

Compile the model, too, where its shapes are few: `Captured` records what `torch.compile` makes of it.

```python
from deltasam.speed.compiling import compiled

fast = compiled(model)  # nothing is compiled before the first step of a shape; save `model`, not this
```

`compiled` is `torch.compile` with four things that were found by profiles (`benchmarks/profile_step.py`). The compiler
tries out the sizes of its kernels. Under autocast, layers that read the same input (query, key, value) become one
product, which fills the GPU better, and gradients of weights leave their product in float32, where autocast rounds
them, writes them, reads them and casts them. In float32 and TF32 attention is written out: the fused kernels for
float32 are old, and slow at the lengths of sentences. The tables of compiled steps made before commit e3bf5d8 are
without the two for autocast.

## What was measured

Training steps with random weights of these shapes, dropout 0.1, AdamW (fused) included, several steps in a row as in
training. All candidates of a measurement take turns in one process; ratios are taken within a round, and the table
gives their median and half the distance of the quartiles. `DeltaSAM-ambient` probes in the precision of the other
passes (two extra forwards); by default the probes run in float32, and under autocast a third one with them.
`DeltaSAM-every-4` is the same with `probe_every=4`. Compiled models are compiled as above. Eager times depend on the
host as much as on the GPU: trust the ratios of captured steps more.
"""


@dataclass(frozen=True)
class Figure:
    """A ratio of two steps with what it is to be at most: (bf16, tf32), for all sizes or for one."""

    name: str
    above: str
    below: str
    targets: tuple[float, float] | None = None
    size: str | None = None
    times: float = 1.0

    def of(self, result: Result) -> tuple[float, float] | None:
        """Median and half the distance of the quartiles."""
        found = parts["ratio"](result, self.above, self.below)
        return None if found is None else (found[0] / self.times, found[1] / self.times)


FIGURES = (
    Figure("captured SAM / (2 x captured ERM)", "SAM captured", "ERM captured", (1.03, 1.03), times=2),
    Figure("captured delta-SAM / captured SAM", "DeltaSAM-ambient captured", "SAM captured", (1.38, 1.38)),
    Figure("the same with `probe_every=4`", "DeltaSAM-every-4 captured", "SAM captured", (1.12, 1.12)),
    Figure("captured exact per-instance / captured SAM", "PerInstanceSAM captured", "SAM captured", (1.12, 1.08)),
    Figure("captured delta-SAM / *eager* ERM", "DeltaSAM-ambient captured", "ERM", (0.8, 1.0), size="16x64"),
    Figure("captured + compiled SAM / captured SAM", "SAM compiled+captured", "SAM captured", (0.75, 0.9)),
    Figure("eager exact per-instance / eager SAM", "PerInstanceSAM", "SAM", (1.5, 1.5)),
)
PARTS = ("eager", "figures", "compiled", "loop", "growth", "cpu", "adamw", "train")
MEMORY_TARGET = 1.4
EXACT = 'per-instance with `factors="exact"`'
PER_INSTANCE = {"per-instance": "PerInstanceSAM", EXACT: "PerInstanceSAM-exact"}
ROUNDED = (
    "With TF32 `PerInstanceSAM` keeps the output gradients of layers that widen in bfloat16 by default;\n"
    '`PerInstanceSAM-exact` (`factors="exact"`) keeps them as they are.'
)
SCOPES = {"everything": True, "beyond weights and optimizer": False}


def read(folder: Path) -> list[Result]:
    """The measurements in a folder that came to something, and those that failed, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def made(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if "failed" not in result]


def size(result: Result) -> str:
    return f"{result['options']['batch']}x{result['options']['length']}"


def marked(value: float, spread: float | None, target: float | None) -> str:
    around = "" if spread is None else f" ±{spread:.2f}"
    if target is None:
        return f"{value:.2f}{around}"
    return f"{value:.2f}{around} {'✓' if round(value, 2) <= target else '✗'}"


def figures(results: Sequence[Result]) -> str:
    """One table per model and size: every ratio beside its target; of two measurements the first counts."""
    measured = made(results)
    shapes = dict.fromkeys((result["options"]["model"], size(result)) for result in measured)
    blocks = ["✓: at most the target, to two digits; ✗: more than it; -: not measured."]
    if any(row["name"] == PER_INSTANCE[EXACT] for result in measured for row in result["rows"]):
        blocks.append(ROUNDED)
    for model, shape in shapes:
        here = [r for r in measured if (r["options"]["model"], size(r)) == (model, shape)]
        lines = ["| ratio | target | bf16 | target | TF32 |", "|---|---|---|---|---|"]
        for figure in FIGURES:
            aimed = figure.targets if figure.size in (None, shape) else None
            lines.append(f"| {figure.name} |" + _cells(here, figure.of, aimed))
        aimed = (MEMORY_TARGET, MEMORY_TARGET) if shape == "32x128" else None
        for name, way, (what, total) in product(PER_INSTANCE, ("captured", "eager"), SCOPES.items()):

            def ratio(
                result: Result, name: str = name, way: str = way, total: bool = total
            ) -> tuple[float, None] | None:
                found = parts["memory_ratio"](result, way, total=total, method=PER_INSTANCE[name])
                return None if found is None else (found, None)

            if any(ratio(result) for result in here):
                lines.append(f"| peak memory {name} / SAM, {way}, {what} |" + _cells(here, ratio, aimed))
        blocks.append(f"### {model}, {shape.replace('x', ' x ')}\n\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def _cells(
    results: Sequence[Result],
    of: Callable[[Result], tuple[float, float | None] | None],
    targets: tuple[float, float] | None,
) -> str:
    text = ""
    for precision, target in zip(("bf16", "tf32"), targets or (None, None), strict=True):
        found = [value for r in results if r["options"]["precision"] == precision and (value := of(r)) is not None]
        text += f" {'' if target is None else f'<= {target:g}'} |"
        text += f" {marked(*found[0], target) if found else '-'} |"
    return text


def provenance(results: Sequence[Result]) -> str:
    """On what, of which commit and by which commands."""
    facts = [result["machine"] for result in results]
    devices = sorted({f"{fact['device']}, torch {fact['torch']}" for fact in facts})
    commits = sorted({fact.get("commit", "unknown") for fact in facts})
    commands = sorted({result["command"] for result in results if "command" in result})
    text = f"{'; '.join(devices)}; commit {', '.join(commits)}."
    return text + "".join(f"\n\n    PYTHONPATH=src {command}" for command in commands)


def details(results: Sequence[Result]) -> str:
    """The rows of every measurement, folded away."""
    return "\n\n".join(
        f"<details><summary>{parts['title'](result)}</summary>\n\n{parts['rows'](result)}\n\n</details>"
        for result in results
    )


def failures(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        options = result["options"]
        where = (
            f"{result['part']}: {options['model']}, {options['batch']} x {options['length']}, {options['precision']}"
        )
        if "failed" in result:
            lines.append(f"- {where}: {result['failed']}")
        lines += [f"- {where}, {name}: {why}" for name, why in result.get("failures", {}).items()]
    return "\n".join(lines)


def page(results: Path = RESULTS) -> str:
    """The page; what was not measured is not on it."""
    found = {
        part: read(results / part)
        for part in ("eager", "figures", "compiled", "loop", "growth", "cpu", "adamw", "train")
    }
    blocks = [INTRODUCTION.rstrip()]
    taken = [*found["eager"], *found["figures"], *found["compiled"]]
    steps = made(taken)
    if steps:
        blocks += ["## The figures", provenance(steps), figures(taken), details(steps)]
    for part, heading in parts["SECTIONS"].items():
        measured = made(found[part])
        if measured:
            where = [] if part == "train" else [provenance(measured)]
            blocks += [f"## {heading}", *where, parts[part](measured)]
    failed = failures([result for part in found if part != "train" for result in found[part]])
    if failed:
        blocks += ["## What could not be measured", failed]
    for folder, heading in ((results, parts["OLDER"]), (results / "one-step", parts["ONE_STEP"])):
        older = read(folder)
        if older:
            blocks += [heading, older_figures(older), details(older)]
    return "\n\n".join(blocks) + "\n"


def older_figures(results: Sequence[Result]) -> str:
    """Ratios of medians: these measurements did not keep their rounds."""
    head = [f"{r['options']['model']} {size(r)} {r['options']['precision']}" for r in results]
    lines = ["| ratio | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for figure in FIGURES:
        cells = []
        for result in results:
            seconds = {row["name"]: row["seconds"]["median"] for row in result["rows"]}
            known = figure.above in seconds and figure.below in seconds
            cells.append(f"{seconds[figure.above] / seconds[figure.below] / figure.times:.2f}" if known else "-")
        lines.append(f"| {figure.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plots(results: Path = RESULTS) -> dict[str, str]:
    """The plots by file name."""
    charts: dict[str, str] = parts["growth_plots"](made(read(results / "growth")))
    return charts


if __name__ == "__main__":
    PAGE.write_text(page())
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, svg in plots().items():
        (PLOTS / name).write_text(svg)
    print(f"wrote {PAGE.relative_to(ROOT)} and {len(plots())} plots in {PLOTS.relative_to(ROOT)}")
