"""``deltasam env``: what a bug report needs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "deltasam", "torch", "transformers", "accelerate", "datasets", "sentence-transformers", "peft", "lightning",
    "pytorch_optimizer", "numpy", "tyro", "pydantic",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Env:
    """Versions, devices and the commit, to paste into a bug report."""

    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> None:
        """Prints the facts."""
        facts = environment()
        if self.json:
            print(json.dumps(facts, indent=2))
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")


def environment() -> dict[str, str]:
    """The facts about this installation, by name; packages that are not installed are left out."""
    facts = {"python": sys.version.split()[0], "platform": platform.platform()}
    installed = {package: version for package in PACKAGES if (version := _version(package))}
    return facts | installed | _devices() | _commit()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    import torch

    facts = {
        "cpu threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda or "not in this build of torch"),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return facts


def _commit() -> dict[str, str]:
    """The commit of the sources, if they lie in a git checkout of this project and not in site-packages."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode != 0:
            return {}
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": commit + (" with uncommitted changes" if changed else "")}
