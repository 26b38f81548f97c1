"""Facts that are stored with a measurement: device, versions, commit."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from deltasam import __version__
from deltasam.lab.bench._workbench import Workbench
from deltasam.lab.commit import commit


def machine(bench: Workbench) -> dict[str, str]:
    """Returns device, versions, commit and size of the model."""
    on_gpu = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": str(torch.get_num_threads()),
        "load": "" if on_gpu or not hasattr(os, "getloadavg") else f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "deltasam": __version__,
        "commit": commit() or "unknown",
        "parameters": str(sum(p.numel() for p in bench.model.parameters())),
        "parameter_bytes": str(bench.parameter_bytes),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
