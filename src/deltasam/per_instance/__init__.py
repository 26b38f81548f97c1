r"""Exact per-instance weight perturbations at about the price of SAM.

For a linear layer with inputs :math:`X_i` (T x in) and output gradients :math:`D_i` (T x out) of instance i, the
gradient of its loss is :math:`D_i^\top X_i`, so the layer perturbed for that instance is

.. math:: (W + c_i D_i^\top X_i)\, x = W x + c_i D_i^\top (X_i x), \qquad c_i = \rho / \lVert \nabla l_i \rVert,

two small products instead of a weight of its own. One batched pass gives X and D of all instances (no weight gradient
is computed), Gram matrices give the norms, :math:`\lVert D^\top X \rVert^2 = \langle X X^\top, D D^\top \rangle`,
and in a second batched pass plain autograd yields exactly :math:`\frac1N \sum_i \nabla l_i(w + \epsilon_i)`.

How it works, file by file: ``_tensors`` lets proxies stand in for the parameters during a pass, ``_rules`` says what
happens when an operation meets one, ``_layout`` finds the instances in an input, ``_step`` remembers the calls,
``_gradient`` turns them into ``_factors``, ``_perturbation`` applies them, ``_verify`` compares with autograd once per
model, ``_trial`` makes the passes that only a comparison needs, ``_places`` puts the proxies in and takes them out,
``_record`` ties the pass together, ``_ascent`` makes adversaries of it, ``_functions`` offers it all for one batch.

The algebra of the norms is that of ghost clipping in differential privacy (Goodfellow 2015; Li et al. 2022);
per-example low-rank weights are also used by FLoRA, per-example random ones by Flipout. New here is the forward pass
*at* the per-instance weights w + eps_i.
"""

from deltasam.per_instance.ascent import Ascent, adversarial, ascend, both_sides
from deltasam.per_instance.functions import instance_adversarial_losses, instance_gradient_norms, perturbed_instances
from deltasam.per_instance.interception.rules import register_rule
from deltasam.per_instance.interception.slots import refuse_batch_statistics
from deltasam.per_instance.memory import tell_once
from deltasam.per_instance.recording import Recording, record
from deltasam.per_instance.verification.errors import InstancesMixedError, UncoveredError

__all__ = [
    "Ascent",
    "InstancesMixedError",
    "Recording",
    "UncoveredError",
    "adversarial",
    "ascend",
    "both_sides",
    "instance_adversarial_losses",
    "instance_gradient_norms",
    "perturbed_instances",
    "record",
    "refuse_batch_statistics",
    "register_rule",
    "tell_once",
]
