"""Whole steps as CUDA graphs, one per batch shape: sharpness-aware training at the price of fewer launches."""

from deltasam.capture._captured import Captured, CaptureReport
from deltasam.capture._key import NotCapturableError
from deltasam.capture._padding import PadToBuckets

__all__ = ["CaptureReport", "Captured", "NotCapturableError", "PadToBuckets"]
