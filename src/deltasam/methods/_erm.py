"""Plain training: the gradient of the mean loss."""

from __future__ import annotations

from dataclasses import dataclass

from deltasam.methods._base import Method
from deltasam.methods._step import Step, plain_step
from deltasam.step.passes import Passes


@dataclass(frozen=True, kw_only=True)
class ERM(Method):
    r"""Empirical risk minimisation: :math:`\nabla \frac1N \sum_i l_i(w)`.

    Cost: 1 forward, 1 backward, no extra memory.

    Example:
        >>> import torch
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = ERM().backward(model, torch.ones(4, 2), objective)
        >>> step.losses.shape, step.forwards, step.backwards
        (torch.Size([4]), 1, 1)
    """

    cost = "1/1"
    perturbs = "nothing"

    def _step(self, passes: Passes) -> Step:
        return plain_step(passes)

    def is_erm(self) -> bool:
        """Returns True."""
        return True
