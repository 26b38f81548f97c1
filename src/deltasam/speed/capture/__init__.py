"""Whole steps as CUDA graphs, one per batch shape: sharpness-aware training at the price of fewer launches."""

from deltasam.speed.capture._captured import Captured, CaptureReport
from deltasam.speed.capture._key import NotCapturableError
from deltasam.speed.capture._padding import PadToBuckets

__all__ = ["CaptureReport", "Captured", "NotCapturableError", "PadToBuckets"]
