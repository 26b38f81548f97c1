"""``deltasam quickstart --llm``: LoRA on a real language model, plain and with exact per-instance SAM on the base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltasam.lab.cli._errors import one_line_errors
from deltasam.lab.cli._output import plain_table, progress_bar, silence_libraries, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from deltasam.lab.experiments import Result

VARIANTS = {"": "plain LoRA", "/per-instance": "per-instance SAM on the base"}
COLUMNS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "forgetting": "forgetting",
    "accuracy_4bit": "accuracy, 4 bits",
}


def quickstart_llm(output: Path, model: str) -> None:
    """Trains twice, measures and prints the table."""
    from deltasam.lab.experiments import RunFolder, resolve, run

    console = wide_console()
    silence_libraries()
    for line in (
        "Which package of Python's standard library does this description of a function come from?",
        f"{model} learns to answer with one of six words: LoRA adapters, 80 updates with each method.",
        "The publisher of smollm2-135m rounded its weights to 4 bits. Each run ends with an evaluation.\n",
    ):
        console.print(line, highlight=False)
    folders, results = [], []
    with one_line_errors():
        for variant, name in VARIANTS.items():
            config = resolve(preset=f"quickstart-llm{variant}", options={"model": model})
            folders.append(output / type(config.method).__name__)
            with progress_bar(f"{name:<28}") as watch:
                results.append(run(config, folders[-1], watch=watch))
            RunFolder(folders[-1]).keep_only("weights")
    console.print()
    console.print(llm_table(results))
    for line in _next(output, folders):
        console.print(line, highlight=False)


def llm_table(results: Sequence[Result]) -> Table:
    """Returns one row per method: quality, forgetting, what is left with 4 bits, and cost."""
    table = plain_table("method", *COLUMNS.values(), "seconds", "passes")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in zip(VARIANTS.values(), results, strict=True):
        numbers = [f"{result.metrics[metric]:{'+' if metric == 'forgetting' else ''}.3f}" for metric in COLUMNS]
        passes = f"{result.forward_passes}/{result.backward_passes}"
        table.add_row(name, *numbers, f"{result.train_seconds:.0f}", passes)
    return table


def _next(output: Path, folders: Sequence[Path]) -> tuple[str, ...]:
    return (
        "",
        "Per-instance SAM perturbs the frozen matrices, for each text in its own direction, while the adapters learn.",
        "NLL, ECE: log loss and calibration error of the answers. Forgetting: rise of the log loss per token on other",
        "text. 4 bits: the adapters are merged and the weights rounded. Passes: forward/backward.",
        "One short run each and 181 texts: differences in accuracy below 0.05 are noise, and no method is ranked.",
        "",
        f"Run folders: {output}/{{{','.join(folder.name for folder in folders)}}}",
        "What to try next:",
        f"  deltasam evaluate {folders[1]}",
        "  deltasam train --preset llm/mnli/per-instance        # GLUE as prompts, from the hub or from --data",
        "  deltasam train --preset llm/chat/per-instance task.files.train=a.jsonl task.files.validation=b.jsonl",
        "  deltasam train --preset llm/mnli/per-instance --model your/llm model.lora.r=32 method.rho=0.01",
    )
