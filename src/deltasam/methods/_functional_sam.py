"""Functional SAM: the Jacobian of the outputs at w + eps, the derivative of the losses by the outputs at w."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltasam.methods._base import Method
from deltasam.methods._fields import radius
from deltasam.methods._step import Step, make_step
from deltasam.objectives import Objective
from deltasam.objectives.nesting import innermost
from deltasam.step.checks import shown
from deltasam.step.cotangents import Cotangents
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class FunctionalSAM(Method):
    r"""Functional SAM: perturbs the function that the model computes, not the loss of its outputs.

    With the outputs :math:`f(w)` of the model (logits), their Jacobian :math:`J(w)` and the loss :math:`l(f)`,

    .. math:: g = J(w)^\top\, \nabla_f l(f(w)), \qquad \epsilon^* = \rho\, g / \lVert g \rVert_2, \qquad
              \text{gradient} = J(w + \epsilon^*)^\top\, \nabla_f l(f(w))

    SAM's gradient is :math:`J(w + \epsilon^*)^\top \nabla_f l(f(w + \epsilon^*))`. The paper finds that in language
    models SAM mostly regularises through the second factor, the statistics of the logits, and not through the
    function. Its variant that also preconditions the perturbation is left out: methods do not know the optimizer.

    The outputs are those of :meth:`~deltasam.objectives.Objective.forward`, so the objective must be one of
    this package, or derived from :class:`~deltasam.Objective`. With R-Drop and its like they are the outputs of all
    views. Weights of the objective itself get the gradient at the outputs at :math:`w + \epsilon^*`, as in SAM.

    Cost: 2 forwards, 2 backwards; one extra copy of the perturbed parameters, and one of the outputs.

    Attributes:
        rho: Radius of the perturbation; 0 is plain training.

    Raises:
        TypeError: The objective is a plain function, whose outputs are not known.

    References:
        Singh et al., Avoiding spurious sharpness minimization broadens applicability of SAM, ICML 2025.

    Relations:
        :class:`SAM`, if the losses are linear in the outputs.

    Example:
        >>> import torch
        >>> from deltasam import Classification
        >>> model, batch = torch.nn.Linear(2, 3), (torch.rand(4, 2), torch.tensor([0, 1, 2, 0]))
        >>> step = FunctionalSAM(rho=0.05).backward(model, batch, Classification())
        >>> step.forwards, step.backwards, bool(step.sharpness > 0)
        (2, 2, True)
    """

    rho: Rho = radius()
    uses_direction_only = True

    def _step(self, passes: Passes) -> Step:
        _require_outputs(passes.objective_kind)
        cotangents = Cotangents()
        losses, grads = passes.gradient(cotangents=cotangents)
        with passes.ascend(grads, self.radius) as ascent:
            perturbed = passes.accumulate(cotangents=cotangents)
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


def _require_outputs(objective: Any) -> None:
    if not isinstance(innermost(objective), Objective):
        raise TypeError(
            f"objective={shown(objective)} returns losses alone, but FunctionalSAM also needs the outputs of the "
            "model: call method.backward(model, batch, objective) with an objective such as deltasam.Classification() "
            "or your own subclass of deltasam.Objective; or use SAM, which works with any function and closure"
        )
