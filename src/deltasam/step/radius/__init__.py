"""How far a perturbation goes: a number, or a rule that gives the number of each step.

.. autosummary::

    LossBudget
    LossShare
    Relative
    Layerwise
    Groups
    Scheduled
"""

from __future__ import annotations

from deltasam.step.radius._base import Climb, Fixed, Number, Radius, Rho, Sizes, sizes_of
from deltasam.step.radius._given import as_radius, check_radius
from deltasam.step.radius._groups import Groups
from deltasam.step.radius._layerwise import Layerwise, Relative
from deltasam.step.radius._losses import LossBudget, LossShare
from deltasam.step.radius._numbers import Numbers, on_device
from deltasam.step.radius._progress import Progress
from deltasam.step.radius._scheduled import Scheduled

__all__ = [
    "Climb",
    "Fixed",
    "Groups",
    "Layerwise",
    "LossBudget",
    "LossShare",
    "Number",
    "Numbers",
    "Progress",
    "Radius",
    "Relative",
    "Rho",
    "Scheduled",
    "Sizes",
    "as_radius",
    "check_radius",
    "on_device",
    "sizes_of",
]
