"""Rows of the table of promises for methods that perturb the input, and for regularisers inside methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deltasam import R3F, SMART, TAVAT, DeltaSAM, EmbeddingNoise, FreeLB, NEFTune, Objective, RDrop
from deltasam.methods import SAM, Method
from helpers.rows import Row


def first_layer(name: str, module: nn.Module) -> bool:
    """The first layer of a model of the table; a model without children is its first layer."""
    return name in {"embeddings", "conv", "0", "experts.0", "experts.1"} or (not name and not list(module.children()))


@dataclass(frozen=True)
class Outputs(Objective):
    """Makes the table's callables objectives, whose divergence compares the losses."""

    function: Callable[[nn.Module, Any], Tensor]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.function(model, batch)

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return (first - second).square()


def _ascent(kind: type[FreeLB], *, init: bool) -> Callable[..., Method]:
    """The method with its step (and initial noise) for a radius; zero is plain training."""

    def make(*, rho: float, **changes: Any) -> Method:
        settings = {"adv_lr": rho, "init_magnitude": rho if init else 0.0, "max_norm": None, "embeddings": first_layer}
        return kind(**settings | changes)

    return make


OTHER_NAME = "rho-by-name"  # its hyperparameter has another name in messages
SAME_BACKWARD = "bad-gradient"  # the ascent uses a backward that also trains, or one inside the objective
ROWS = [
    Row("freelb", _ascent(FreeLB, init=False), (3, 3), exempt=("one-instance", OTHER_NAME, SAME_BACKWARD)),
    # noise that depends on the position in the batch
    Row(
        "freelb-init",
        _ascent(FreeLB, init=True),
        (3, 3),
        exempt=("one-instance", "permutation", "micro-batches", "buffers-at-w", OTHER_NAME, SAME_BACKWARD),
    ),
    Row("tavat", _ascent(TAVAT, init=False), (3, 3), exempt=("one-instance", OTHER_NAME, SAME_BACKWARD)),
    Row("sam-rdrop", SAM, (2, 2), wrap=lambda o: RDrop(Outputs(o)), exempt=("bad-objective",)),
    Row(
        "delta-sam-noise",
        DeltaSAM,
        (4, 2),
        wrap=lambda o: EmbeddingNoise(o, scale=0.1, embeddings=first_layer),
        exempt=("permutation", "micro-batches", "bad-objective"),
    ),
    Row(
        "sam-neftune",
        SAM,
        (2, 2),
        wrap=lambda o: NEFTune(o, alpha=1.0, embeddings=first_layer),
        exempt=("permutation", "micro-batches", "bad-objective"),
    ),
    # several passes in one call of the objective; the table counts one
    Row(
        "sam-r3f",
        SAM,
        (2, 2),
        wrap=lambda o: R3F(Outputs(o), eps=0.1, masks="shared", embeddings=first_layer),
        exempt=("permutation", "micro-batches", "passes", "bad-objective", SAME_BACKWARD),
    ),
    Row(
        "delta-sam-smart",
        DeltaSAM,
        (4, 2),
        wrap=lambda o: SMART(
            Outputs(o), mu=0.0, epsilon=0.1, sigma=0.1, eta=0.1, masks="shared", embeddings=first_layer
        ),
        exempt=("permutation", "micro-batches", "passes", "bad-objective", SAME_BACKWARD),
    ),
]
