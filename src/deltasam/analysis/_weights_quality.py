"""Whether a weighting measures the instances or the rounding: its signal-to-noise on the user's model and data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deltasam.analysis._alignment import WEIGHTINGS
from deltasam.analysis._common import batches_of, in_mode, same_kernels, spearman
from deltasam.batches import tree_map
from deltasam.passes import ObjectiveLike, Passes
from deltasam.randomness import Randomness, Seed
from deltasam.weighting import Weighting

Condition = Literal[
    "float64", "float32", "bf16", "another direction", "dropout, shared masks", "dropout, independent masks"
]


@dataclass(frozen=True)
class WeightsQuality:
    """One weighting under one condition, means over the batches.

    The reference is the same weighting in float64 without dropout and, except for "another direction", along the same
    random direction.

    Attributes:
        weighting: Its name.
        condition: Precision, direction or masks.
        spearman: Rank correlation with the reference.
        snr: Variance of the reference over the mean squared difference from it, both scaled to mean 1: above 1 the
            weights say more about the instances than about the noise.
        ideal: Rank correlation with a_i ||grad_i|| from each instance's own gradient in float64: the theory's.
        median: Median weight.
    """

    weighting: str
    condition: Condition
    spearman: float
    snr: float
    ideal: float
    median: float


def weights_quality(
    model: nn.Module,
    data: Iterable[Any],
    objective: ObjectiveLike,
    *,
    rho: float = 0.05,
    eta: float = 1e-4,
    weightings: Mapping[str, Weighting] | None = None,
    seed: int = 0,
    limit: int | None = None,
    progress: bool | None = None,
) -> list[WeightsQuality]:
    """How much of each weighting's g is signal, in float64, float32 and bfloat16, and under dropout.

    On a real model the paper's weights at the paper's radius are at or below float32 rounding, in bfloat16 and with
    dropout masks of their own in every probe they are noise; this shows it for yours, and what repairs it.

    Args:
        model: The model; a float64 copy of it is made.
        data: Batches.
        objective: ``objective(model, batch) -> (N,)``.
        rho: Radius of the probes, unless a weighting has its own.
        eta: Floor of the denominator.
        weightings: By name; all by default, without the controls.
        seed: Seed of the random directions.
        limit: At most so many batches.
        progress: Show a progress bar; by default on a terminal.

    Example:
        >>> model, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), [torch.rand(6, 3)]
        >>> rows = weights_quality(model, data, lambda model, x: model(x).squeeze(-1) ** 2)
        >>> [row.spearman for row in rows if row.condition == "float64"]
        [1.0, 1.0, 1.0]
    """
    chosen = weightings or {n: w for n, w in WEIGHTINGS.items() if n not in ("Uniform", "RandomWeights")}
    wide = deepcopy(model).double()
    first, second = Seed(seed, 0), Seed(seed, 1)
    found: dict[tuple[str, Condition], list[tuple[float, ...]]] = {}
    for batch in batches_of(model, data, limit, progress, "quality of the weights"):
        large = tree_map(
            lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
        )

        def measure(
            weighting: Weighting, *, exact: bool, seed: Seed = first, masks: Randomness | None = None,
            bf16: bool = False, large: Any = large, batch: Any = batch,
        ) -> Tensor:  # fmt: skip
            where = wide if exact else model
            kind = next(where.parameters()).device.type
            scene = torch.autocast(kind, dtype=torch.bfloat16) if bf16 else nullcontext()
            with in_mode(where, masks is not None), scene, same_kernels():
                passes = Passes(where, large if exact else batch, objective, randomness=masks or "shared")
                return weighting.probe(passes, rho=rho, eta=eta, seed=seed)(passes.losses()).double().cpu()

        ideal = measure(WEIGHTINGS["OwnGradient"], exact=True)
        for name, weighting in chosen.items():
            options: dict[str, Any] = {"precision": "ambient"} if hasattr(weighting, "precision") else {}
            rough = replace(weighting, **options)
            reference = measure(weighting, exact=True)
            results: dict[Condition, Tensor] = {
                "float64": reference,
                "float32": measure(weighting, exact=False),
                "bf16": measure(rough, exact=False, bf16=True),
                "another direction": measure(weighting, exact=True, seed=second),
                "dropout, shared masks": measure(weighting, exact=True, masks="shared"),
                "dropout, independent masks": measure(weighting, exact=True, masks="independent"),
            }
            for condition, g in results.items():
                numbers = (spearman(g, reference), _snr(g, reference), spearman(g, ideal), float(g.median()))
                found.setdefault((name, condition), []).append(numbers)
    return [
        WeightsQuality(name, condition, *torch.tensor(rows).double().mean(0).tolist())
        for (name, condition), rows in found.items()
    ]


def _snr(g: Tensor, reference: Tensor) -> float:
    scaled, wanted = g / g.mean(), reference / reference.mean()
    noise = (scaled - wanted).square().mean()
    return float(wanted.var(unbiased=False) / noise) if noise > 0 else float("inf")
