"""Radii in units of the weights, for all parameters together or for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from deltasam.step.checks import check_number
from deltasam.step.norms import step_size
from deltasam.step.radius._base import Climb, Number, Radius, Sizes

By = Literal["entries", "tensors"]
Per = Literal["all", "tensor"]


@dataclass(frozen=True)
class Relative(Radius):
    r"""A radius in proportion to the weights.

    .. math:: \rho = r\, \lVert w \rVert_2 \quad \text{(per="all")}, \qquad
              \epsilon_t = r\, \lVert w_t \rVert_2\, \frac{\nabla_t l}{\lVert \nabla_t l \rVert_2} \quad
              \text{(per="tensor")}

    w are the perturbed parameters, and t runs over their tensors. With ``per="tensor"`` every tensor moves by the same
    share of its norm, and one that is zero (LoRA's B at the start) does not move.

    Cost: reads the weights once per step. ``per="tensor"``: one more copy of the direction for a moment.

    Attributes:
        r: The radius relative to the norm of the weights.
        per: ``"all"`` or ``"tensor"``.

    Example:
        >>> from deltasam import SAM
        >>> model, objective = torch.nn.Linear(2, 1, bias=False), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SAM(rho=Relative(0.01)).backward(model, torch.ones(4, 2), objective)
        >>> bool(torch.isclose(step.radius, 0.01 * model.weight.norm()))
        True
    """

    r: float = 1e-4
    per: Per = "all"

    def __post_init__(self) -> None:
        """Checks the values."""
        check_number("r", self.r, 0)
        if self.per not in get_args(Per):
            raise ValueError(f"per={self.per!r} must be 'all' or 'tensor'")

    def radius_of(self, climb: Climb) -> Number:
        """A share of the norm of the weights."""
        return self.r * climb.weight_norm()

    def is_per_parameter(self) -> bool:
        """Whether the radius is per tensor."""
        return self.per == "tensor"

    def sizes(self, climb: Climb) -> Sizes:
        """One number, or one per tensor."""
        if self.per == "all":
            return super().sizes(climb)
        return sizes_of_each(self.r * climb.weight_norm_of_each(), climb)

    def scaled(self, factor: Number) -> Relative:
        """Scales the share."""
        return self._with(r=self.r * factor)


@dataclass(frozen=True)
class Layerwise(Radius):
    r"""A fixed radius that is divided among the tensors, whatever their shares of the gradient are.

    .. math:: \epsilon_t = \rho\, a_t\, \nabla_t l / \lVert \nabla_t l \rVert_2, \qquad \textstyle\sum_t a_t^2 = 1

    With one norm for all tensors, those with large gradients (embeddings, the last layers of a wide model) get nearly
    all of the perturbation. Here every tensor gets its part. The whole perturbation has the norm rho.

    Cost: one more copy of the direction for a moment.

    Attributes:
        rho: The norm of the whole perturbation.
        by: ``"entries"``: :math:`a_t^2` is the share of the tensor in all entries, so that entries move equally far on
            average; ``"tensors"``: all tensors move equally far.

    References:
        Haas et al., muP^2: Effective Sharpness Aware Minimization Requires Layerwise Perturbation Scaling, 2024, shows
        why one norm fails for wide models; its scaling by the kind of layer can be given by a mapping.

    Example:
        >>> from deltasam import SAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = SAM(rho=Layerwise(0.1)).backward(model, torch.ones(4, 2), objective)
        >>> round(float(step.radius), 6)
        0.1
    """

    rho: float = 0.01
    by: By = "entries"

    def __post_init__(self) -> None:
        """Checks the values."""
        check_number("rho", self.rho, 0)
        if self.by not in get_args(By):
            raise ValueError(f"by={self.by!r} must be 'entries' or 'tensors'")

    def radius_of(self, climb: Climb) -> Number:
        """The number."""
        return self.rho

    def is_per_parameter(self) -> bool:
        """Always."""
        return True

    def sizes(self, climb: Climb) -> Sizes:
        """One number per tensor."""
        counts = [p.numel() if self.by == "entries" else 1 for p in climb.params]
        shares = torch.tensor([(count / sum(counts)) ** 0.5 for count in counts], dtype=torch.float64, device="cpu")
        # Multiplied on the host where that is possible: a recording cannot copy from memory that is not pinned.
        return sizes_of_each([self.rho * share for share in shares.tolist()], climb)

    def scaled(self, factor: Number) -> Layerwise:
        """Scales the radius."""
        return self._with(rho=self.rho * factor)


def sizes_of_each(radii: Tensor | list[Number], climb: Climb) -> Sizes:
    """The sizes of an ascent whose K parameters have their own radii; none moves if the whole norm is not finite."""
    norms = climb.direction_norm_of_each()  # (K,) or (K, G)
    rows = [step_size(radii[k], norms[k]) for k in range(norms.shape[0])]
    steps = torch.stack([torch.where(torch.isfinite(climb.norm), row, torch.zeros_like(row)) for row in rows])
    return Sizes(steps, torch.linalg.vector_norm(_products(steps, norms), dim=0))


def _products(steps: Tensor, norms: Tensor) -> Tensor:
    return torch.where(steps == 0, torch.zeros_like(steps), steps * norms)
