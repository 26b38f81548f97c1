"""A radius that changes during the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from deltasam.step.checks import check_number
from deltasam.step.radius._base import Climb, Number, Radius, Rho
from deltasam.step.radius._given import as_radius, check_radius
from deltasam.step.radius._progress import Progress

Unit = Literal["share", "steps", "epochs"]
Ramp = Literal["linear", "cosine"]
After = Literal["constant", "linear", "cosine", "lr"]


@dataclass(frozen=True)
class Scheduled(Radius):
    r"""A radius times a factor that depends on the progress of the training.

    .. math:: \rho_t = \rho \cdot \begin{cases} 0 & t < \text{start} \\
              \text{ramp}((t - \text{start}) / \text{warmup}) & t < \text{start} + \text{warmup} \\
              \text{after}(t) & \text{else} \end{cases}

    Steps with a factor of zero are plain training, at its cost: ``Scheduled(0.01, start=0.75)`` is SAM in the last
    quarter. ``GSAM``'s schedule is ``Scheduled(rho_max, after="lr", end=rho_min / rho_max)``, Flat-LoRA's noise
    ``Scheduled(0.05, warmup=1.0, ramp="cosine")``.

    The Trainers of this package know the length of the training and the learning rate. In your own loop pass
    ``total``, or call ``method.set_progress(...)`` before each step. A captured step is not recorded again when the
    factor changes.

    Attributes:
        rho: The radius: a number, a rule or a mapping.
        start: Where the perturbation begins; plain training before.
        warmup: How long the radius grows from zero.
        unit: The unit of both: ``"share"`` of the training, ``"steps"`` or ``"epochs"``.
        ramp: How it grows: ``"linear"``, or ``"cosine"`` (half a period).
        after: What follows: ``"constant"``; ``"linear"`` or ``"cosine"``: decays until the end; ``"lr"``: follows the
            learning rate relative to its peak.
        end: The factor at the end of a decay, or at a learning rate of zero.
        total: Number of steps of the training, where nothing else tells it.

    Example:
        >>> import torch
        >>> from deltasam import SAM
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = SAM(rho=Scheduled(0.1, start=0.5, total=4))
        >>> [method.backward(model, torch.ones(4, 2), objective).forwards for _ in range(4)]
        [1, 1, 2, 2]
    """

    rho: Rho = 0.01
    start: float = 0.0
    warmup: float = 0.0
    unit: Unit = "share"
    ramp: Ramp = "linear"
    after: After = "constant"
    end: float = 0.0
    total: int | None = None

    def __post_init__(self) -> None:
        """Checks the values; a mapping becomes a rule."""
        check_radius("rho", self.rho)
        object.__setattr__(self, "rho", as_radius(self.rho))
        for name in ("start", "warmup"):
            check_number(name, getattr(self, name), 0, 1 if self.unit == "share" else math.inf)
        check_number("end", self.end, 0)
        if self.total is not None:
            check_number("total", self.total, 1, whole=True)
        for name, options in (("unit", Unit), ("ramp", Ramp), ("after", After)):
            if getattr(self, name) not in get_args(options):
                allowed = ", ".join(map(repr, get_args(options)))
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")

    @property
    def needs_gradient(self) -> bool:  # type: ignore[override]
        """Whether the rule inside does."""
        return as_radius(self.rho).needs_gradient

    def at(self, progress: Progress) -> Radius:
        """The radius at one point of the training, without the schedule.

        Raises:
            ValueError: Something that the schedule depends on is not known.
        """
        factor = self.factor(progress)
        return as_radius(self.rho).at(progress).scaled(factor)

    def factor(self, progress: Progress) -> float:
        """The factor at one point of the training."""
        total = self.total if self.total is not None else progress.total
        here, step = self._place(progress, total)
        if here < self.start:
            return 0.0
        into = here + step - self.start  # at the end of this step, so that the first step of a warm-up is perturbed
        if self.warmup and into < self.warmup:
            share = into / self.warmup
            return share if self.ramp == "linear" else (1 - math.cos(math.pi * share)) / 2
        if self.after == "constant":
            return 1.0
        if self.after == "lr":
            if progress.lr is None:
                _missing("after='lr'", "lr=scheduler.get_last_lr()[0] / peak")
            return self.end + (1 - self.end) * progress.lr
        if total is None:
            _missing(f"after={self.after!r}", "total=...")
        first = self._first_step_after(progress, total)
        share = min(max((progress.step - first) / max(total - first, 1), 0.0), 1.0)
        left = 1 - share if self.after == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.end + (1 - self.end) * left

    def _place(self, progress: Progress, total: int | None) -> tuple[float, float]:
        """Where the training is, and the length of a step, in the unit of the schedule."""
        if not self.start and not self.warmup:
            return 0.0, 0.0  # nothing to know
        if self.unit == "steps":
            return progress.step, 1
        if self.unit == "epochs":
            if progress.epoch is None:
                _missing("unit='epochs'", "epoch=...")
            return progress.epoch, progress.epoch / progress.step if progress.step else 0.0
        if total is None:
            _missing("unit='share'", "total=...")
        return progress.step / total, 1 / total

    def _first_step_after(self, progress: Progress, total: int) -> float:
        """The step at which the decay begins."""
        length = self.start + self.warmup
        if self.unit == "share":
            return length * total
        if self.unit == "steps" or not length:
            return length
        return length * progress.step / progress.epoch if progress.epoch else 0.0

    def radius_of(self, climb: Climb) -> Number:
        """Not defined without the progress."""
        raise ValueError("a Scheduled radius is used through a method, which knows the progress of the training")

    def scaled(self, factor: Number) -> Scheduled:
        """Scales the radius."""
        return self._with(rho=as_radius(self.rho).scaled(factor))


def _missing(what: str, argument: str) -> NoReturn:
    remedy = " or write Scheduled(..., total=...)" if argument.startswith("total") else ""
    raise ValueError(
        f"rho=Scheduled({what}) depends on the progress: call method.set_progress({argument}) before each step{remedy}"
    )
