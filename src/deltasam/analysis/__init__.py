"""Measurements on a user's own model and data: adversarial risk, sharpness, alignment, quality of the weights.

All take ``(model, data, objective, ...)`` with ``data`` an iterable of batches, measure in eval mode unless told
otherwise, leave the model as it was, and show a progress bar on a terminal.
"""

from deltasam.analysis._alignment import WEIGHTINGS, Alignment, alignment
from deltasam.analysis._landscape import (
    filter_direction,
    gradient_direction,
    instance_slice,
    line_slice,
    plane_slice,
)
from deltasam.analysis._risk import Risk, adversarial_risk
from deltasam.analysis._sharpness import Sharpness, sharpness
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
