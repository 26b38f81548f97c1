"""Measurements on your model and data: adversarial risk, sharpness, alignment, quality of the weights, landscape.

All functions take ``(model, data, objective, ...)``, where ``data`` is an iterable of batches. They measure in eval
mode by default, leave the model unchanged, and show a progress bar on a terminal if ``rich`` is installed.
"""

from deltasam.analysis._alignment import WEIGHTINGS, Alignment, alignment
from deltasam.analysis._landscape import filter_direction, gradient_direction, instance_slice, line_slice, plane_slice
from deltasam.analysis._risk import Risk, Sharpness, adversarial_risk, sharpness
from deltasam.analysis._weights_quality import WeightsQuality, weights_quality

__all__ = [
    "WEIGHTINGS",
    "Alignment",
    "Risk",
    "Sharpness",
    "WeightsQuality",
    "adversarial_risk",
    "alignment",
    "filter_direction",
    "gradient_direction",
    "instance_slice",
    "line_slice",
    "plane_slice",
    "sharpness",
    "weights_quality",
]
