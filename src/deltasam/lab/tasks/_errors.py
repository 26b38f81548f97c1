"""The error for data that cannot be trained on."""

from __future__ import annotations


class DataError(ValueError):
    """A dataset, split, column, label or model is missing or wrong; raised before any training."""
