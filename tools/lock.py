"""Writes the versions installed in this environment to constraints.txt, which the test suite runs with.

Run with ``make lock`` after an upgrade.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = {"deltasam", "pip", "setuptools", "wheel"}
PINNED_EVERYWHERE = {"torch"}
HEADER = """\
# The versions that the test suite runs with; `make` installs them (pip install -c constraints.txt). Written by
# `make lock`. Reasons to pin:
#   torch          unconstrained ranges take the newest build, on Linux with its CUDA libraries
#   transformers   the gradient accumulation of its Trainer has changed between minor versions
#   all others     an unchanged commit must not start to fail because of a new release
# Many versions do not exist for a Python older than the one they were locked with: there, pip is free to choose.
"""


def pin(name: str, version: str) -> str:
    line = f"{name}=={version.split('+')[0]}"  # 2.13.0, not 2.13.0+cpu: the build is the machine's choice
    if name in PINNED_EVERYWHERE:
        return line
    return f'{line} ; python_version >= "{sys.version_info.major}.{sys.version_info.minor}"'


def main() -> None:
    found = {re.sub(r"[-_.]+", "-", dist.name).lower(): pin(dist.name, dist.version) for dist in distributions()}
    pins = [line for name, line in sorted(found.items()) if name not in LEFT_OUT]
    Path(__file__).parents[1].joinpath("constraints.txt").write_text(HEADER + "\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
