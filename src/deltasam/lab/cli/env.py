"""``deltasam env``: versions and devices, for bug reports."""

from __future__ import annotations

import json
from contextlib import suppress
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
        import torch

        from deltasam.lab.experiments import environment

        facts = {**environment(), "cuda": torch.version.cuda or "not in this build of torch"}
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            facts[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        for package in OPTIONAL:
            with suppress(metadata.PackageNotFoundError):
                facts[package] = metadata.version(package)
        if self.json:
            print(json.dumps(facts, indent=2))
            return
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
