"""The error for a run that cannot be started as it was described."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration, preset or output folder is wrong; raised before any training."""
