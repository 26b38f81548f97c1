"""Instance weights for delta-SAM: losses at w, w + r and w - r become g, shape (N,).

Eq. 5 of the paper is :class:`FiniteDifference`; the others repair it or serve as controls.
"""

from deltasam.weighting._base import InstanceWeights as InstanceWeights
from deltasam.weighting._base import Weighting
from deltasam.weighting._base import usable as usable
from deltasam.weighting._controls import LossWeights, RandomWeights, Uniform
from deltasam.weighting._directional import Directional
from deltasam.weighting._finite_difference import FiniteDifference
from deltasam.weighting._norm_weights import Norms as Norms
from deltasam.weighting._norm_weights import NormWeights
from deltasam.weighting._own_gradient import OwnGradient

# Also the table of weightings by name, so it contains only weightings.
__all__ = [
    "Directional", "FiniteDifference", "LossWeights", "NormWeights", "OwnGradient", "RandomWeights", "Uniform",
    "Weighting",
]  # fmt: skip
