"""Rows of the table of promises for methods that perturb the input, and for regularisers inside methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deltasam import R3F, SMART, TAVAT, TRAM, DeltaSAM, EmbeddingNoise, FreeLB, NEFTune, RDrop
from deltasam.methods import SAM, Method
from helpers.problems import Outputs
from helpers.rows import Row


def first_layer(name: str, module: nn.Module) -> bool:
    """The first layer of a model of the table; a model without children is its first layer."""
    return name in {"embeddings", "conv", "0", "experts.0", "experts.1"} or (not name and not list(module.children()))


class Directed(Outputs):
    """The same, as if the outputs were probabilities with a directed divergence."""

    directional = True


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
    # noise that depends on the position in the batch; another radius than SAM's
    Row(
        "tram",
        lambda **changes: TRAM(noise_scale=1.0, embeddings=first_layer, **changes),
        (3, 2),
        rho=1.0,
        wrap=Directed,
        exempt=("one-instance", "permutation", "micro-batches", "bad-objective"),
    ),
    # its first step has no weights to compare with: more in test_references_ascents.py
    Row(
        "tram-previous",
        lambda **changes: TRAM(against="previous", **changes),
        (3, 2),
        rho=1.0,
        wrap=Directed,
        exempt=("one-instance", "bad-objective", "first-step-moves"),
    ),
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
