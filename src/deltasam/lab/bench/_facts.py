"""Facts stored with a measurement: device, versions, commit, and the storage form of per-instance gradients."""

from __future__ import annotations

import os
import platform
from importlib import metadata, util

import torch
from torch import nn

from deltasam import __version__
from deltasam.lab.bench._workbench import Workbench
from deltasam.lab.commit import commit
from deltasam.per_instance import InstancesMixedError, LowRank, UncoveredError, record


def machine(bench: Workbench) -> dict[str, str]:
    """Returns device, versions, commit and size of the model."""
    on_gpu = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": str(torch.get_num_threads()),
        "load": "" if on_gpu or not hasattr(os, "getloadavg") else f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers") if util.find_spec("transformers") else "",
        **({"adapters": bench.adapters} if bench.adapters else {}),
        "deltasam": __version__,
        "commit": commit() or "unknown",
        "parameters": str(sum(p.numel() for p in bench.model.parameters())),
        "parameter_bytes": str(bench.parameter_bytes),
    }


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
