r"""Methods: each one replaces ``loss.backward()`` by ``method.backward(model, batch, objective)``.

A method answers one question: at which weights is the gradient of the batch taken? It is written in the four verbs of
:class:`deltasam.step.passes.Passes`: ``losses`` (no graph), ``gradient`` (of weighted losses), ``ascend`` (to w + eps
and back), ``accumulate`` (into ``.grad``).

From the paper to the code:

============================  ==========================================================================
:math:`w`                     ``model.parameters()``; those a method may perturb: ``passes.params``
:math:`l_i(w)`                ``step.losses``, shape (N,)
:math:`l_i(w + \epsilon)`      ``step.perturbed_losses``
:math:`g_i` (Eq. 5)           ``step.weights``, from a :class:`~deltasam.weighting.Weighting`
:math:`r`                     ``random_direction`` in :mod:`deltasam.step.directions`
:math:`\epsilon^*` (Eq. 7)     the move made by ``passes.ascend``
:math:`\rho, \eta`             ``rho``, ``eta``
:math:`\mathcal{R}`            ``step.sharpness``
============================  ==========================================================================

Your own method derives from :class:`Method`. :func:`number`, :func:`radius`, :func:`random_seed` and :func:`choice`
declare hyperparameters with a range, :func:`make_step` makes the record of a step, :func:`plain_step` runs a step of
plain training.
"""

import warnings
from typing import Any

from deltasam.methods._asam import ASAM
from deltasam.methods._awp import AWP
from deltasam.methods._base import Method
from deltasam.methods._bi_lora import BiLoRA
from deltasam.methods._buffers import Buffer
from deltasam.methods._delta_sam import DeltaSAM
from deltasam.methods._erm import ERM
from deltasam.methods._esam import ESAM
from deltasam.methods._fields import choice, number, radius, random_seed
from deltasam.methods._fisher_sam import FisherSAM
from deltasam.methods._freelb import FreeLB
from deltasam.methods._friendly_sam import FriendlySAM
from deltasam.methods._functional_sam import FunctionalSAM
from deltasam.methods._gradient_norm_penalty import GradientNormPenalty
from deltasam.methods._gsam import GSAM
from deltasam.methods._look_sam import LookSAM
from deltasam.methods._momentum_sam import MomentumSAM
from deltasam.methods._multi_step_sam import MultiStepSAM
from deltasam.methods._per_instance_sam import PerInstanceSAM
from deltasam.methods._random_perturbation import RandomPerturbation
from deltasam.methods._rw_sam import RWSAM
from deltasam.methods._sam import SAM
from deltasam.methods._step import Step, make_step, plain_step
from deltasam.methods._subset_sam import SubsetSAM
from deltasam.methods._tat import TAT
from deltasam.methods._tavat import TAVAT
from deltasam.methods._tram import TRAM
from deltasam.methods._wsam import WSAM
from deltasam.step.checks import check_number
from deltasam.step.radius import Rho

__all__ = [
    "ASAM", "AWP", "ERM", "ESAM", "GSAM", "RWSAM", "SAM", "TAT", "TAVAT", "TRAM", "WSAM", "BiLoRA", "Buffer",
    "DeltaSAM", "FisherSAM", "FreeLB", "FriendlySAM", "FunctionalSAM", "GradientNormPenalty", "LookSAM", "Method",
    "MomentumSAM", "MultiStepSAM", "PerInstanceSAM", "RandomPerturbation", "Rho", "Step", "SubsetSAM", "check_number",
    "choice", "make_step", "number", "plain_step", "radius", "random_seed",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Former names, for one version."""
    if name == "finish":
        warnings.warn("deltasam.methods.finish is now called make_step", DeprecationWarning, stacklevel=2)
        return make_step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
