"""Training steps with LoRA, measured by ``deltasam bench step --lora``, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deltasam.lab.pages.statistics import table

_HEAD = ("step", "eager: ms", "x plain", "GiB", "x plain", "captured: ms", "x plain", "GiB", "x plain")


def steps(results: Path, model: str) -> str:
    """Time and peak memory of every step, and relative to plain LoRA that is run in the same way.

    A second file holds steps that were measured again or later, with plain LoRA beside them.
    """
    files = sorted((results / "lora").glob(f"{model}*.json"), key=lambda path: len(path.name))
    rows = [row for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    found = {(row["method"], row["way"]): row for row in rows if row["method"] != "plain LoRA"}
    found |= {(row["method"], row["way"]): row for row in reversed(rows) if row["method"] == "plain LoRA"}
    methods = dict.fromkeys(row["method"] for row in rows)
    return table(_HEAD, [[f"`{m}`", *(_cells(found.get((m, way))) for way in ("eager", "captured"))] for m in methods])


def provenance(results: Path, model: str) -> str:
    """What was measured, and where."""
    record = json.loads((results / "lora" / f"{model}.json").read_text(encoding="utf-8"))
    machine, options = record["machine"], record["options"]
    million = int(machine["parameters"]) // 10**6
    return (
        f"{options['model']}, {million} million parameters in bfloat16, LoRA {options['rank']} in all linear layers "
        f"({machine['adapters']}), {options['batch']} x {options['length']} tokens"
        f"{', gradient checkpointing' if options['checkpointing'] else ''}; {machine['device']}, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, AdamW included."
    )


def radii(results: Path) -> str:
    """The runs of ``llm-radius.yaml``: MNLI as prompts, one seed."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / "llm-radius").glob("*/*.json"))]
    rows.sort(key=lambda row: row["config"]["method"].get("rho", 0.0))
    metrics = ("accuracy", "nll", "ece", "forgetting", "accuracy_8bit", "accuracy_4bit", "accuracy_3bit")
    head = ("step", "accuracy", "NLL", "ECE", "forgetting", "8 bits", "4 bits", "3 bits")
    return table(head, [[_arm(row), *(f"{row['metrics'][name]:.3f}" for name in metrics)] for row in rows])


def _arm(row: dict[str, Any]) -> str:
    rho = row["config"]["method"].get("rho")
    return "plain LoRA" if rho is None else f"per instance on the base, {rho:g}"


def _cells(row: dict[str, object] | None) -> str:
    """Four columns; times are medians over the rounds, memory is the peak from the first step on, with the weights."""
    if row is None:
        return " |  |  | "
    ratio, memory = row["times_plain"], row["memory_times_plain"]
    assert isinstance(row["seconds"], dict)
    cells = [f"{1000 * row['seconds']['median']:.0f}", f"{ratio['median']:.2f}" if isinstance(ratio, dict) else ""]
    total = row["total_bytes"]
    cells.append(f"{total / 2**30:.1f}" if isinstance(total, int) else "")
    return " | ".join([*cells, f"{memory:.2f}" if isinstance(memory, float) else ""])
