"""How the per-instance engine keeps the gradients of a model's layers: in low rank, or written out."""

from __future__ import annotations

from torch import nn

from deltasam.lab.bench._workbench import Workbench
from deltasam.per_instance import InstancesMixedError, LowRank, UncoveredError, record


def layers_by_form(bench: Workbench) -> dict[str, int] | None:
    """Linear layers by the form that the engine chose for this batch, from one recording; None if it cannot record.

    A gradient of T positions costs T (in + out) in low rank and in * out written out; the engine takes the cheaper
    form layer by layer.
    """
    try:
        with bench.precision():
            recording = record(bench.model, lambda: bench.objective(bench.model, bench.batch), size=bench.size)
    except (InstancesMixedError, UncoveredError, RuntimeError):  # RuntimeError: out of memory
        return None
    forms = {"low-rank": 0, "materialised": 0}
    for module in bench.model.modules():
        found = recording.gradients.factors.get(id(module.weight)) if isinstance(module, nn.Linear) else None
        if found:
            forms["low-rank" if any(isinstance(each, LowRank) for each in found) else "materialised"] += 1
    return forms
