"""Which radius to try first: where the measured loss rises by a given share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.analysis._common import batches_of
from deltasam.methods import Method, check_number
from deltasam.per_instance import UncoveredError, ascend, one_by_one, warn_of_loop
from deltasam.step.norms import global_norm
from deltasam.step.passes import ObjectiveLike, Passes, prepare_objective
from deltasam.step.selection import Selection

_STEPS = 8
_PRECISE = 1e-3  # of the wanted rise: the search ends
_USABLE = 0.1  # of the wanted rise: the result counts


@dataclass(frozen=True)
class RadiusSuggestion:
    """A radius from the measured sharpness; ``float(suggestion)`` is its value.

    Attributes:
        rho: The median of the radii.
        low: Their lower quartile.
        high: Their upper quartile.
        share: The rise of the loss relative to the loss.
        loss: The mean loss at w.
        grad_norm: The mean norm of the gradients at w.
        radii: The radius of each batch, or of each instance; NaN where there is none, because the loss or the gradient
            is zero, or because the loss does not rise so far.
    """

    rho: float
    low: float
    high: float
    share: float
    loss: float
    grad_norm: float
    radii: Tensor

    def __float__(self) -> float:
        return self.rho


def suggest_radius(
    model: nn.Module,
    batches: Iterable[Any],
    objective: ObjectiveLike,
    *,
    method: Method | None = None,
    share: float = 0.02,
    params: Selection | None = None,
    limit: int | None = None,
    progress: bool | None = None,
) -> RadiusSuggestion:
    r"""Returns the radius at which the measured loss rises by a share of itself, without any training.

    .. math:: l\!\left(w + \rho\, \frac{\nabla l(w)}{\lVert \nabla l(w) \rVert_2}\right) - l(w) = \kappa\, l(w)

    It is solved for :math:`\rho` in every batch, from the first-order solution :math:`\kappa\, l / \lVert \nabla l
    \rVert` by secant steps. With ``method=PerInstanceSAM()`` it is solved for every instance, with the instance's loss
    and gradient. The median is a starting point for a search over radii (``deltasam search radius``), not its result:
    how far the loss may rise is your choice.

    The gradient of a model with a new head is smaller than that of a trained one by a factor of 2 to 4. On GLUE,
    :math:`l / \lVert \nabla l \rVert` fell from 0.4 to 0.1 during the training. So measure a model that has been
    trained for some steps, or take the lower end, ``low``.

    The model is measured in its current mode. In train mode all passes over a batch have the same dropout masks. The
    weights, ``.grad``, buffers and random streams stay as they were.

    Cost: a forward and a backward per batch, and 2 to 4 further forwards, at most 8. Memory: that of a SAM step, or of
    a step of :class:`~deltasam.PerInstanceSAM`.

    Args:
        model: The model, in the mode (usually train) that it is trained in.
        batches: Batches of the size that is trained with; the gradient of a larger batch is smaller.
        objective: ``objective(model, batch) -> (N,)``.
        method: A method with one perturbation per batch (the default), or per instance. Its ``rho`` has no effect.
        share: :math:`\kappa`, the rise of the loss relative to the loss.
        params: Which parameters are perturbed; by default those of the method, or all that are trained.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Raises:
        ValueError: There are no batches; ``share`` is not above 0; the method does not follow the gradient of the
            weights; or there is no radius at which a loss rises so far.

    Example:
        >>> from deltasam import SAM
        >>> _ = torch.manual_seed(0)
        >>> model, batches = nn.Linear(2, 1), [torch.rand(4, 2) for _ in range(5)]
        >>> objective = lambda model, x: (model(x).squeeze(-1) - 1) ** 2
        >>> found = suggest_radius(model, batches, objective, share=0.1)
        >>> step = SAM(rho=float(found.radii[0])).backward(model, batches[0], objective)
        >>> round(float(step.sharpness / step.loss), 3), found.low <= found.rho <= found.high
        (0.1, True)
    """
    check_number("share", share, 0, open_low=True)
    if method is not None:
        _check_method(method)
    chosen = params if params is not None else "trained" if method is None else method.params
    per_instance = method is not None and method.perturbs == "instances"
    rows = []
    for batch in batches_of(model, batches, limit, progress, "radius"):
        prepare_objective(objective, model)
        passes = Passes(model, batch, objective, params=chosen)
        if per_instance:
            assert method is not None
            rows += [_of_instances(part, share, method) for part in passes.parts()]
        else:
            rows.append(_of_batch(passes, share))
    losses, norms, radii = (torch.cat([part.double().cpu() for part in column]) for column in zip(*rows, strict=True))
    usable = radii[torch.isfinite(radii)]
    if not len(usable):
        raise ValueError(
            f"no loss rises by share={share:g} of itself along its gradient (mean loss {float(losses.mean()):g}, mean "
            f"gradient norm {float(norms.mean()):g}): losses must be above 0 and have a gradient; try a smaller share"
        )
    low, median, high = torch.quantile(usable, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return RadiusSuggestion(median, low, high, share, float(losses.mean()), float(norms.mean()), radii)


def _check_method(method: Method) -> None:
    """Raises a ValueError unless rho of the method is a distance along the gradient of the weights."""
    if not isinstance(method, Method):
        raise TypeError(f"method={method!r} must be a method such as SAM(), or None")
    if method.perturbs not in ("weights", "instances") or not (method.follows_gradient and method.plain_ascent):
        raise ValueError(
            f"method={type(method).__name__}: its radius is not a distance along the gradient of the weights, so it "
            "cannot be measured here; use SAM(), PerInstanceSAM() or None, or `deltasam search radius`"
        )


def _of_batch(passes: Passes, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, the norm of its gradient and the radius, each of shape (1,)."""
    losses, grads = passes.gradient(keep_side_effects=False)
    norm = global_norm([g for g in grads if g is not None]).to(passes.device)
    loss = losses.double().mean()

    def rise(rho: Tensor) -> Tensor:
        with passes.ascend(grads, rho.squeeze(0), norm=norm, consume=False):
            return (passes.losses().double().mean() - loss).unsqueeze(0)

    slope = norm.double().unsqueeze(0) / passes.fraction
    return loss.unsqueeze(0), slope, _solved(rise, loss.unsqueeze(0), slope, share)


def _of_instances(part: Passes, share: float, method: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, the norm of its gradient and the radius of every group of instances, each of shape (G,)."""
    group = getattr(method, "group", 1)
    try:
        found = None if getattr(method, "engine", "auto") == "loop" else ascend(part, 1.0, group=group)
    except UncoveredError as why:
        warn_of_loop(part, why)
        found = None
    if found is None:
        rows = [_of_batch(each, share) for each in one_by_one(part, group)[1]]
        loss, norm, radius = (torch.cat(column) for column in zip(*rows, strict=True))
        return loss, norm, radius
    ascent = found
    loss = _means(ascent.losses, group)
    counts = _counts(ascent.losses, group)

    def rise(rho: Tensor) -> Tensor:
        terms = [(gradients, c * rho.to(c)) for gradients, c in ascent.terms]
        with dataclasses.replace(ascent, terms=terms).perturbed():
            return _means(part.losses(), group) - loss

    slope = ascent.norms.double() / counts
    return loss, slope, _solved(rise, loss, slope, share)


def _means(losses: Tensor, group: int) -> Tensor:
    return torch.stack([part.double().mean() for part in losses.split(group)])


def _counts(losses: Tensor, group: int) -> Tensor:
    return torch.tensor([len(part) for part in losses.split(group)], dtype=torch.float64, device=losses.device)


def _solved(rise: Callable[[Tensor], Tensor], loss: Tensor, slope: Tensor, share: float) -> Tensor:
    """Solves ``rise(rho) = share * loss`` for each entry: secant steps inside a bracket; NaN without a solution."""
    wanted = share * loss
    low, high = torch.zeros_like(loss), torch.full_like(loss, torch.inf)
    before, error_before = low, -wanted
    rho = wanted / slope
    possible = (wanted > 0) & torch.isfinite(rho) & (rho > 0)
    rho = torch.where(possible, rho, 0.0)
    best, least = rho, torch.full_like(loss, torch.inf)
    for _ in range(_STEPS):
        error = rise(rho) - wanted
        better = error.abs() < least
        best, least = torch.where(better, rho, best), torch.where(better, error.abs(), least)
        if bool(((least <= _PRECISE * wanted) | ~possible).all()):
            break
        low, high = torch.where(error < 0, rho, low), torch.where(error < 0, high, rho)
        secant = rho - error * (rho - before) / (error - error_before)
        fallback = torch.where(torch.isfinite(high), (low + high) / 2, 2 * rho)
        inside = torch.isfinite(secant) & (secant > low) & (secant < high) & (secant <= 4 * rho)
        before, error_before = rho, error
        rho = torch.where(possible, torch.where(inside, secant, fallback), 0.0)
    return torch.where(possible & (least <= _USABLE * wanted), best, torch.nan)
