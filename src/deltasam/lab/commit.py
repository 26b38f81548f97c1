"""The commit of the sources, recorded with results."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

VARIABLE = "DELTASAM_COMMIT"


@functools.cache
def commit() -> str | None:
    """Returns ``DELTASAM_COMMIT``, for machines to which the sources were copied; else the commit from git; else None.

    The commit from git is followed by "with uncommitted changes" if there are any.
    """
    return os.environ.get(VARIABLE) or _head()


def _head() -> str | None:
    git = ("git", "-C", str(Path(__file__).parents[1]))
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode != 0:  # installed into an environment inside another checkout
            return None
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")
