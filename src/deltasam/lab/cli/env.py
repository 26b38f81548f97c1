"""``deltasam env``: versions and devices, for bug reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata

# In addition to what every run stores with its results.
OPTIONAL = ("sentence-transformers", "peft", "lightning", "pytorch_optimizer", "tyro", "pydantic")


@dataclass(frozen=True, kw_only=True)
class Env:
    """Prints versions, devices and the commit, to paste into a bug report."""

    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> None:
        """Prints one line per fact."""
        facts = _facts()
        if self.json:
            print(json.dumps(facts, indent=2))
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")


def _facts() -> dict[str, str]:
    from deltasam.lab.experiments import environment

    return {**environment(), **_devices(), **{name: version for name in OPTIONAL if (version := _version(name))}}


def _devices() -> dict[str, str]:
    import torch

    facts = {"cuda": torch.version.cuda or "not in this build of torch"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
