"""Writes the versions installed in this environment to constraints.txt, the versions the test suite is run with.

Run with ``make lock`` after an upgrade. A version that exists only from some Python on gets a marker, so that older
interpreters are free to take the last one that supports them.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

OLDEST = (3, 10)
LEFT_OUT = {"deltasam", "pip", "setuptools", "wheel"}
HEADER = """\
# The versions the test suite is run with; `make` installs with them (pip install -c constraints.txt). Written by
# `make lock`. Why pin at all:
#   torch          unconstrained ranges take the newest build, on Linux with its CUDA libraries
#   transformers   the gradient accumulation of its Trainer has changed between minor versions
#   all others     a test that fails on an unchanged commit must have its cause in this repository
"""


def oldest_python(requires: str) -> tuple[int, int]:
    """The first Python a ``Requires-Python`` such as ``>=3.11.0,!=3.14.1`` allows."""
    found = re.search(r">=\s*3\.(\d+)", requires)
    return (3, int(found.group(1))) if found else OLDEST


def line(name: str, version: str, requires: str) -> str:
    pin = f"{name}=={version.split('+')[0]}"  # 2.13.0, not 2.13.0+cpu: the build is the machine's choice
    oldest = oldest_python(requires)
    return f'{pin} ; python_version >= "{oldest[0]}.{oldest[1]}"' if oldest > OLDEST else pin


def main() -> None:
    found = {
        re.sub(r"[-_.]+", "-", dist.name).lower(): line(
            dist.name, dist.version, dist.metadata["Requires-Python"] or ""
        )
        for dist in distributions()
    }
    pins = [pin for name, pin in sorted(found.items()) if name not in LEFT_OUT]
    Path(__file__).parents[1].joinpath("constraints.txt").write_text(HEADER + "\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
