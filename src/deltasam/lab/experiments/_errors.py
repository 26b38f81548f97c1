"""The errors of runs."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration, preset or output folder is wrong; raised before any training."""


class HeldError(ConfigError):
    """Another process is making this run."""


class RunStoppedError(Exception):
    """A run was told to stop, wrote a checkpoint, and goes on from there when it is started again."""


class DivergedError(Exception):
    """A run was ended because its gradients were no longer finite; its last good checkpoint is named."""
