"""The table of methods that all promises are tested on: a new method is one row here.

``exempt`` names the promises that cannot hold for a method by its definition, with the reason in a comment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deltasam import methods as m
from deltasam.methods import Method
from deltasam.objectives import Classification, Objective
from deltasam.weighting import Directional, FiniteDifference, LossWeights, OwnGradient, RandomWeights, Uniform
from helpers.problems import Outputs, cross_entropy


@dataclass(frozen=True)
class Row:
    """A method with its number of passes and its exemptions."""

    name: str
    make: Callable[..., Method]
    passes: tuple[int, int]
    rho: float | None = 0.05
    wrap: Callable[[Any], Any] = field(default=lambda objective: objective)
    exempt: tuple[str, ...] = ()

    def method(self, **changes: Any) -> Method:
        return self.make(**({} if self.rho is None else {"rho": self.rho}) | changes)

    def __str__(self) -> str:
        return self.name


def _with(cls: Any, **defaults: Any) -> Callable[..., Method]:
    return lambda **changes: cls(**{**defaults, **changes})


def _with_outputs(function: Any) -> Objective:
    """The objective whose losses are those of the table's cross-entropy; of other functions the outputs are losses."""
    return Classification() if function is cross_entropy else Outputs(function)


def _awp(*, rho: float, **changes: Any) -> Method:
    """AWP has a relative length per tensor instead of a radius; the bounds on the entries follow it."""
    return m.AWP(**{"adv_lr": rho, "adv_eps": rho, **changes})


ONE_PASS = ("one-instance", "losses-at-w", "buffers-at-w", "first-backward-is-the-ascent")

ROWS = [
    Row("erm", m.ERM, (1, 1), rho=None),
    Row("sam", m.SAM, (2, 2)),
    Row("sam-no-bias-norm", _with(m.SAM, params="no-bias-norm"), (2, 2)),
    Row("delta-sam", m.DeltaSAM, (4, 2)),
    Row("delta-sam-3-draws", _with(m.DeltaSAM, weighting=FiniteDifference(samples=3, radius=0.5)), (8, 2)),
    Row("delta-sam-directional", _with(m.DeltaSAM, weighting=Directional()), (3, 2)),
    Row(
        "delta-sam-own-gradient",
        _with(m.DeltaSAM, weighting=OwnGradient()),
        (5, 3),
        exempt=("cnn", "passes", "first-backward-is-the-ascent"),
    ),  # the first backward is the probe's
    Row("delta-sam-uniform", _with(m.DeltaSAM, weighting=Uniform()), (2, 2)),
    Row("delta-sam-loss", _with(m.DeltaSAM, weighting=LossWeights()), (2, 2)),
    # a random permutation of the weights cannot follow a permutation of the batch
    Row("delta-sam-random", _with(m.DeltaSAM, weighting=RandomWeights()), (4, 2), exempt=("permutation",)),
    Row("rw-sam", m.RWSAM, (3, 2)),
    Row(
        "rw-sam-exact",
        _with(m.RWSAM, norms="exact"),
        (3, 3),
        exempt=("cnn", "passes", "first-backward-is-the-ascent"),
    ),  # the first backward is the probe's
    Row("multi-step-sam", _with(m.MultiStepSAM, ascent_steps=3), (4, 4), exempt=("one-instance",)),
    # perturbs tensors by name, and adds the plain gradient: without a perturbation there would be two of them
    Row(
        "awp",
        _awp,
        (2, 2),
        exempt=("one-instance", "tiny-rho", "rho-by-name", "parameters-without-layers"),
    ),
    # BatchNorm makes the instances depend on each other; the first step of a model makes a third backward to verify
    Row("per-instance", m.PerInstanceSAM, (2, 2), exempt=("cnn", "passes")),
    Row(
        "per-instance-groups",
        _with(m.PerInstanceSAM, group=2),
        (2, 2),
        exempt=("cnn", "passes", "permutation", "micro-batches"),
    ),
    Row("asam", m.ASAM, (2, 2), exempt=("one-instance",)),  # another norm
    Row("gsam", m.GSAM, (2, 2), exempt=("one-instance",)),  # another gradient
    # trains on a part of the batch, whose dropout masks have another shape
    Row("esam", m.ESAM, (3, 2), exempt=("tiny-rho", "one-instance", "micro-batches")),
    Row("esam-all-instances", _with(m.ESAM, beta=0.5, gamma=1.0), (2, 2), exempt=("one-instance",)),
    Row("look-sam", m.LookSAM, (2, 2)),
    Row("friendly-sam", m.FriendlySAM, (2, 2)),
    Row("wsam", m.WSAM, (2, 2), exempt=("one-instance",)),  # another gradient
    Row("gradient-norm-penalty", m.GradientNormPenalty, (2, 2), exempt=("one-instance",)),  # another gradient
    # another gradient; refuses functions, which the bad objectives of the table are
    Row("functional-sam", m.FunctionalSAM, (2, 2), wrap=_with_outputs, exempt=("one-instance", "bad-objective")),
    # makes one pass, at the perturbed weights, and its first step has no momentum: more in test_buffers.py
    Row(
        "momentum-sam",
        m.MomentumSAM,
        (1, 1),
        exempt=("one-instance", "losses-at-w", "first-step-moves", "first-backward-is-the-ascent"),
    ),
    # one pass, at the perturbed weights
    Row("random", m.RandomPerturbation, (1, 1), exempt=ONE_PASS),
    Row("random-all", _with(m.RandomPerturbation, per="all"), (1, 1), exempt=ONE_PASS),
    # perturbs layers, and these start with B = 0; there are no adapters here: more in test_bi_lora.py
    Row(
        "bi-lora",
        _with(m.BiLoRA, params="trained", climb="gradient", lr=100.0),
        (1, 1),
        exempt=(*ONE_PASS, "first-step-moves", "parameters-without-layers"),
    ),
    # the ascent uses the first instances only
    Row("subset-sam", m.SubsetSAM, (2, 2), exempt=("permutation", "losses-at-w", "micro-batches")),
    Row("fisher-sam", m.FisherSAM, (2, 2), exempt=("one-instance",)),  # does not move most entries
]
