"""Exact per-instance weight perturbations at about the price of SAM."""

from deltasam.instances._errors import InstancesMixed, Uncovered
from deltasam.instances._memory import tell_once
from deltasam.instances._record import Recording, perturbed, record, refuse_batch_statistics
from deltasam.instances._rules import register_rule

__all__ = [
    "InstancesMixed",
    "Recording",
    "Uncovered",
    "perturbed",
    "record",
    "refuse_batch_statistics",
    "register_rule",
    "tell_once",
]
