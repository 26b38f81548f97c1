r"""Exact per-instance weight perturbations at about the cost of SAM.

**The idea.** A linear layer maps the inputs :math:`X_i` (T x in) of instance i to outputs with the gradients
:math:`D_i` (T x out). The gradient of the loss of this instance is :math:`D_i^\top X_i`, so the perturbed layer is

.. math:: x\,(W + c_i D_i^\top X_i)^\top = x W^\top + c_i\,(x X_i^\top)\, D_i, \qquad
          c_i = \rho / \lVert \nabla l_i \rVert,

two thin products that are added to its output, instead of one weight matrix per instance. A step has two passes:

1. *Record.* One batched forward, and a backward that stops at the outputs of the layers, give X and D of all
   instances. No weight gradient is computed. Gram matrices give the norms,
   :math:`\lVert D^\top X \rVert^2 = \langle X X^\top, D D^\top \rangle`.
2. *Perturb.* A second batched pass adds :math:`c_i (x_i X_i^\top) D_i` to every output. Plain autograd through it
   gives exactly :math:`\frac1N \sum_i \nabla l_i(w + \epsilon_i)`. The weights are never written.

Thin products are cheap while T is small. Where they would cost more, the gradients of the instances are written out in
pass 1, and the layer multiplies with the matrices :math:`W + c_i D_i^\top X_i` in pass 2: as many products as SAM, for
texts of any length. The form of each layer follows from its shapes and a bound on memory (``algebra/costs``).

Embeddings, norms, convolutions and small parameters have their own exact forms. Nothing is assumed silently: on first
use the gradients are compared with autograd's, and the perturbed losses with those at moved weights. For a model that
fails a comparison the engine falls back, with one warning, to a loop over the instances, which is always exact.

**The files**, from the bottom up; a part imports only parts above it in this list.

=================== ===================================================================================================
``errors``          why a model is not covered
``algebra/``        mathematics on tensors: per-instance gradients as factors, their norms, the perturbation they make
``interception/``   how an unchanged model gets there: proxies for parameters, the rules of operations, and where the
                    instances are in a tensor (``batch_rule``)
``verification/``   the comparisons on first use, and what an error means
``compiling/``      both passes of a compiled model: rules for its graph, instead of proxies
``recording``       pass 1, with its verification: :func:`record`; pass 2: ``Recording.perturbed``
``cut_out``         whether an instance that the loop cuts out of its batch has the loss that it has in the batch
``ascent``          adversaries by one or several ascent steps, or by the loop
``functions``       the public functions for one batch
=================== ===================================================================================================

The algebra of the norms is that of ghost clipping in differential privacy (Goodfellow 2015; Li et al. 2022). FLoRA
uses per-example low-rank weights, Flipout per-example random ones. New here is the forward pass *at* the per-instance
weights :math:`w + \epsilon_i`.
"""

from deltasam.per_instance.algebra.factors import LowRank
from deltasam.per_instance.ascent import (
    Ascent,
    Engine,
    adversarial,
    ascend,
    both_sides,
    count_pass,
    gradient_norms,
    one_by_one,
    warn_of_loop,
)
from deltasam.per_instance.errors import InstancesMixedError, UncoveredError
from deltasam.per_instance.functions import instance_adversarial_losses, instance_gradient_norms, perturbed_instances
from deltasam.per_instance.interception.memory import warn_once
from deltasam.per_instance.interception.rules import register_rule
from deltasam.per_instance.interception.slots import refuse_batch_statistics
from deltasam.per_instance.recording import Recording, record

__all__ = [
    "Ascent", "Engine", "InstancesMixedError", "LowRank", "Recording", "UncoveredError", "adversarial", "ascend",
    "both_sides", "count_pass", "gradient_norms", "instance_adversarial_losses", "instance_gradient_norms",
    "one_by_one", "perturbed_instances", "record", "refuse_batch_statistics", "register_rule", "warn_of_loop",
    "warn_once",
]  # fmt: skip
