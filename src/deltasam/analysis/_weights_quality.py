"""Signal-to-noise ratio of the weightings on your model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from deltasam.analysis._alignment import CONTROLS, WEIGHTINGS
from deltasam.analysis._bfloat16 import bfloat16
from deltasam.analysis._common import bar, batches_of, in_mode, means, spearman
from deltasam.methods import check_number
from deltasam.step.batches import tree_map
from deltasam.step.float32 import full_float32
from deltasam.step.passes import ObjectiveLike, Passes
from deltasam.step.randomness import Randomness, Seed
from deltasam.weighting import LossWeights, OwnGradient, Uniform, Weighting, usable

Condition = Literal[
    "float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks"
]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
_MASKS: dict[Condition, Randomness] = {
    "dropout, shared masks": "shared",
    "dropout, independent masks": "independent",
}
_NO_DIRECTION = (OwnGradient, Uniform, LossWeights)


@dataclass(frozen=True)
class WeightsQuality:
    """One weighting under one condition, means over the batches.

    The reference is the same weighting in float64 without dropout, along the same random direction (except for
    "another direction").

    Attributes:
        weighting: Name of the weighting.
        condition: Precision, direction or masks.
        spearman: Rank correlation with the reference.
        snr: Variance of the reference over the mean squared difference from it, both scaled to mean 1. Above 1 there
            is more signal than noise.
        ideal: Rank correlation with the theoretical weights a_i ||grad_i||, from the gradient of each instance in
            float64.
        median: Median weight.
        by_batch: The same four numbers for every batch, to estimate the error of the means.
    """

    weighting: str
    condition: Condition
    spearman: float
    snr: float
    ideal: float
    median: float
    by_batch: dict[str, tuple[float, ...]]


def weights_quality(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    eta: float = 1e-4,
    weightings: Mapping[str, Weighting] | None = None,
    conditions: Sequence[Condition] = CONDITIONS,
    seed: int = 0,
    limit: int | None = None,
    progress: bool | None = None,
) -> list[WeightsQuality]:
    """Measures how much of each weighting's g is signal, in float64, float32 and bfloat16, and with dropout.

    On a real model the paper's weights at the paper's radius are at or below float32 rounding. In bfloat16, and with
    independent dropout masks in every probe, they are noise. This function measures it for your model. TF32 is
    disabled. "bf16" is autocast around all passes, including the probes, with float32 weights.

    Cost per batch: the probes of each weighting once per condition, four of them in float64, and one forward at w per
    condition for all weightings together. Memory: a float64 copy of the model, and a float32 one if its weights are
    not.

    Args:
        model: The model; a float64 copy of it is made.
        data: Batches.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the probes, unless a weighting has its own.
        eta: Floor of the denominator.
        weightings: Weightings by name; by default all except the controls.
        conditions: Conditions to compare with the reference; by default all.
        seed: Seed of the random directions; every batch has its own direction.
        limit: Maximum number of batches.
        progress: Whether to show a progress bar; by default on a terminal.

    Example:
        >>> import torch
        >>> model, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), [torch.rand(6, 3)]
        >>> rows = weights_quality(model, data, lambda model, x: model(x).squeeze(-1) ** 2)
        >>> [row.spearman for row in rows if row.condition == "float64"]
        [1.0, 1.0, 1.0]
    """
    check_number("rho", rho, 0, open_low=True)
    check_number("eta", eta, 0, open_low=True)
    chosen = weightings or {n: w for n, w in WEIGHTINGS.items() if n not in CONTROLS}
    wide, narrow = deepcopy(model).double(), _single(model)
    found: dict[tuple[str, Condition], list[tuple[float, ...]]] = {}
    progress_bar = bar(data, limit, len(chosen) * len(conditions), progress, "quality of the weights")
    with full_float32(next(model.parameters()).device), progress_bar as begin:
        for number, batch in enumerate(batches_of(model, data, limit, False, "")):
            seeds = Seed(seed, 2 * number), Seed(seed, 2 * number + 1)
            batches = (
                batch if narrow is model else tree_map(_to(torch.float32), batch),
                tree_map(_to(torch.float64), batch),
            )
            probes = _Probes(narrow, wide, *batches, objective, rho, eta, *seeds)
            ideal = probes.weights(WEIGHTINGS["OwnGradient"], "float64")
            for name, weighting in chosen.items():
                reference = probes.weights(weighting, "float64")
                for condition in conditions:
                    begin(f"{name}, {condition}")
                    g = probes.weights(weighting, condition)
                    numbers = (spearman(g, reference), _snr(g, reference), spearman(g, ideal), float(g.median()))
                    found.setdefault((name, condition), []).append(numbers)
    columns = ("spearman", "snr", "ideal", "median")
    return [WeightsQuality(name, condition, **means(columns, rows)) for (name, condition), rows in found.items()]


@dataclass(frozen=True)
class _Probes:
    """The weights of one batch under every condition, each measured once."""

    narrow: nn.Module
    wide: nn.Module
    narrow_batch: Any
    wide_batch: Any
    objective: ObjectiveLike
    rho: float
    eta: float
    first: Seed
    second: Seed
    _weights: dict[tuple[int, Condition], Tensor] = field(default_factory=dict)
    _losses: dict[Condition, Tensor] = field(default_factory=dict)

    def weights(self, weighting: Weighting, condition: Condition) -> Tensor:
        """Returns g, (N,), in float64 on the CPU."""
        if condition == "another direction" and isinstance(weighting, _NO_DIRECTION):
            condition = "float64"
        key = (id(weighting), condition)
        if key not in self._weights:
            self._weights[key] = self._measure(weighting, condition)
        return self._weights[key]

    def _measure(self, weighting: Weighting, condition: Condition) -> Tensor:
        is_narrow = condition in ("float32", "bf16")
        model, batch = (self.narrow, self.narrow_batch) if is_narrow else (self.wide, self.wide_batch)
        masks = _MASKS.get(condition)
        precision = bfloat16(next(model.parameters()).device) if condition == "bf16" else nullcontext()
        if condition == "bf16" and hasattr(weighting, "precision"):
            weighting = replace(weighting, precision="ambient")  # type: ignore[call-arg]
        with in_mode(model, masks is not None), precision:
            passes = Passes(model, batch, self.objective, randomness=masks or "shared")
            seed = self.second if condition == "another direction" else self.first
            weigh = weighting.probe(passes, rho=self.rho, eta=self.eta, seed=seed)
            return weigh(self._at_w(passes, condition)).double().cpu()

    def _at_w(self, passes: Passes, condition: Condition) -> Tensor:
        if condition == "dropout, independent masks":  # a cached pass may have the masks of one of the probes
            return passes.losses()
        key: Condition = "float64" if condition == "another direction" else condition
        if key not in self._losses:
            self._losses[key] = passes.losses()
        return self._losses[key]


def _single(model: nn.Module) -> nn.Module:
    """The model with float32 weights: itself, or a copy."""
    is_single = all(p.dtype is torch.float32 for p in model.parameters() if p.is_floating_point())
    return model if is_single else deepcopy(model).float()


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _snr(g: Tensor, reference: Tensor) -> float:
    scaled, wanted = (weights / weights.mean() for weights in (usable(g), usable(reference)))
    noise = (scaled - wanted).square().mean()
    return float(wanted.var(unbiased=False) / noise) if noise > 0 else float("inf")
