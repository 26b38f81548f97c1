"""Measurements on your model and data: risk, sharpness, a first radius, alignment, weights, landscape.

All functions take ``(model, data, objective, ...)``, where ``data`` is an iterable of batches. They measure in eval
mode by default (:func:`suggest_radius` in the mode of the model), leave the model unchanged, and show a progress bar
on a terminal if ``rich`` is installed.

For language models: :func:`forgetting` and :func:`token_nll` on general text, and :func:`quantized`, inside which the
weights are rounded to few bits. :func:`calibration` and :func:`temperature` take the logits of any
classifier.
"""

from deltasam.analysis._alignment import WEIGHTINGS, Alignment, alignment
from deltasam.analysis._calibration import Calibration, ReliabilityBin, calibration, temperature, temperature_scaled
from deltasam.analysis._forgetting import Forgetting, forgetting, token_nll
from deltasam.analysis._landscape import filter_direction, gradient_direction, instance_slice, line_slice, plane_slice
from deltasam.analysis._plots import plot_bits, plot_reliability
from deltasam.analysis._quantized import quantized, rounded
from deltasam.analysis._radius import RadiusSuggestion, suggest_radius
from deltasam.analysis._risk import Risk, Sharpness, adversarial_risk, sharpness
from deltasam.analysis._weights_quality import WeightsQuality, weights_quality

__all__ = [
    "WEIGHTINGS",
    "Alignment",
    "Calibration",
    "Forgetting",
    "RadiusSuggestion",
    "ReliabilityBin",
    "Risk",
    "Sharpness",
    "WeightsQuality",
    "adversarial_risk",
    "alignment",
    "calibration",
    "filter_direction",
    "forgetting",
    "gradient_direction",
    "instance_slice",
    "line_slice",
    "plane_slice",
    "plot_bits",
    "plot_reliability",
    "quantized",
    "rounded",
    "sharpness",
    "suggest_radius",
    "temperature",
    "temperature_scaled",
    "token_nll",
    "weights_quality",
]
