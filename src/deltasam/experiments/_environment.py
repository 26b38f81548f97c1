"""Versions, platform, commit and device: what is needed to understand a number later."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = (
    "deltasam",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "datasets",
    "numpy",
    "scikit-learn",
    "scipy",
)


def environment() -> dict[str, str]:
    """Versions of what decides the numbers, and the commit of the sources if they lie in a checkout."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "device": device_name()}
    installed = {distribution.name.lower(): distribution.version for distribution in metadata.distributions()}
    facts |= {package: installed[package] for package in _PACKAGES if package in installed}
    commit = _git("rev-parse", "HEAD")
    if commit:
        facts["commit"] = commit + (" with uncommitted changes" if _git("status", "--porcelain") else "")
    return facts


def device_name() -> str:
    """The GPU, or the CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def peak_memory() -> int:
    """Largest memory in use so far, in bytes: of the GPU, or of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", __file__], capture_output=True, check=False
        )
        if tracked.returncode != 0:
            return ""
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
