"""What a measurement was made on and of: device, versions, commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from deltasam import __version__
from deltasam.bench._workbench import Workbench

UNKNOWN = "unknown"
VARIABLE = (
    "DELTASAM_COMMIT"  # says the commit where the sources lie in no checkout, as on a machine they were copied to
)


def machine(bench: Workbench) -> dict[str, str]:
    """The facts that are written beside the numbers."""
    on_gpu = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else f"{platform.machine()} CPU",
        "threads": str(torch.get_num_threads()),
        "load": "" if on_gpu or not hasattr(os, "getloadavg") else f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "deltasam": __version__,
        "commit": commit(),
        "parameters": str(sum(p.numel() for p in bench.model.parameters())),
        "parameter_bytes": str(bench.parameter_bytes),
    }


@functools.cache
def commit() -> str:
    """The commit of the sources, and whether they were changed since.

    Where they lie in no checkout, what the environment variable ``DELTASAM_COMMIT`` says, or "unknown".
    """
    return _head() or os.environ.get(VARIABLE) or UNKNOWN


def _head() -> str | None:
    sources = Path(__file__).parents[1]
    git = ("git", "-C", str(sources))
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode != 0:
            return None
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
