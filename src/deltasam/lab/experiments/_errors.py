"""The errors of runs."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration, preset or output folder is wrong; raised before any training."""


class LockedError(ConfigError):
    """Another process is making this run."""


class RunStoppedError(Exception):
    """A signal stopped a run; it wrote a checkpoint and resumes from there when started again."""


class DivergedError(Exception):
    """A run ended because its gradients were no longer finite; the message names its last good checkpoint."""
