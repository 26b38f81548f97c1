r"""Methods: each one replaces ``loss.backward()`` by ``method.backward(model, batch, objective)``.

A method answers one question: at which weights is the gradient of the batch taken? It does so in the four verbs of
:class:`deltasam.step.passes.Passes`: ``losses`` (no graph), ``gradient`` (of weighted losses), ``ascend`` (to w + eps and
back), ``accumulate`` (into ``.grad``).

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

A method of your own needs :class:`Method`, and three functions beside it: :func:`check_number` for a hyperparameter,
:func:`plain_step` where there is nothing to perturb, :func:`make_step` for the record of the step.
"""

from deltasam.methods._asam import ASAM
from deltasam.methods._base import Method, Step, check_number, make_step, plain_step
from deltasam.methods._delta_sam import DeltaSAM
from deltasam.methods._erm import ERM
from deltasam.methods._esam import ESAM
from deltasam.methods._fisher_sam import FisherSAM
from deltasam.methods._freelb import FreeLB
from deltasam.methods._gsam import GSAM
from deltasam.methods._look_sam import LookSAM
from deltasam.methods._per_instance_sam import PerInstanceSAM
from deltasam.methods._sam import SAM
from deltasam.methods._subset_sam import SubsetSAM
from deltasam.methods._tat import TAT
from deltasam.methods._tavat import TAVAT

__all__ = [
    "ASAM",
    "ERM",
    "ESAM",
    "GSAM",
    "SAM",
    "TAT",
    "TAVAT",
    "DeltaSAM",
    "FisherSAM",
    "FreeLB",
    "LookSAM",
    "Method",
    "PerInstanceSAM",
    "Step",
    "SubsetSAM",
    "check_number",
    "make_step",
    "plain_step",
]
