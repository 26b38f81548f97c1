"""Versions, platform, commit and device, recorded with every run."""

from __future__ import annotations

import platform
import resource
import sys
from contextlib import suppress
from importlib import metadata

import torch

from deltasam.lab.commit import commit
from deltasam.lab.plugins import loaded_plugins
from deltasam.step.names import pluralized

_PACKAGES = (
    "deltasam", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy", "scikit-learn", "scipy",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Returns the versions of packages that affect results, the device, the plugins, and the commit in a checkout."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "device": device_name()}
    if torch.cuda.is_available():  # torch's dropout masks depend on their number, and MPS may show a process fewer
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["multiprocessors"] = str(properties.multi_processor_count)
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    if plugins := loaded_plugins():
        facts["plugins"] = ", ".join(plugins)
    sources = commit()
    return facts if sources is None else {**facts, "commit": sources}


def device_name() -> str:
    """Returns the name of the GPU, or the CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {pluralized(torch.get_num_threads(), 'thread')}"


def peak_memory() -> int:
    """Returns the peak memory in bytes: of the GPU, or of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
