"""Finds the real data that some tests use."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def find_shared() -> Path | None:
    """The folder ``shared`` inside or next to the repository, or the one ``DELTASAM_SHARED`` names; None if absent."""
    named = os.environ.get("DELTASAM_SHARED")
    candidates = [Path(named)] if named else [REPOSITORY / "shared", REPOSITORY.parent / "shared"]
    return next((folder for folder in candidates if folder.is_dir()), None)
