"""The form in which the per-instance engine stores the gradients of linear layers: low-rank or materialised."""

from __future__ import annotations

from torch import nn

from deltasam.lab.bench._workbench import Workbench
from deltasam.per_instance import InstancesMixedError, LowRank, UncoveredError, record


def layers_by_form(bench: Workbench) -> dict[str, int] | None:
    """Returns the number of linear layers by form, from one recording of the batch, or None if it cannot be recorded.

    A gradient of T positions takes T (in + out) numbers in low-rank form and in * out materialised. The engine chooses
    the smaller form for each layer.
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
