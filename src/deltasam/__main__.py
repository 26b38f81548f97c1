"""The command ``deltasam``, also as ``python -m deltasam``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDED = ("tyro", "pydantic", "yaml", "rich")


def main() -> int:
    """Runs the command, or names the extra that brings it where its libraries are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"deltasam: the command needs {', '.join(missing)}, which the extra `lab` installs: "
            'pip install "deltasam[lab]". The methods themselves need only torch: from deltasam import SAM.',
            file=sys.stderr,
        )
        return 1
    from deltasam.lab.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
