"""Activation checkpointing recomputes parts of a model in backward, after the contexts of the forward are closed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltasam import (
    ASAM,
    ERM,
    ESAM,
    GSAM,
    R3F,
    SAM,
    SMART,
    VAT,
    Classification,
    Contrastive,
    DeltaSAM,
    Directional,
    EmbeddingNoise,
    FisherSAM,
    FreeLB,
    LookSAM,
    Method,
    OwnGradient,
    PerInstanceSAM,
    SubsetSAM,
)
from helpers.problems import grads, relative_error


class Encoder(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh())
        self.outside = nn.Linear(8, 4)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inside, x, use_reentrant=False) if self.checkpointed else self.inside(x)
        return self.outside(h)


@pytest.mark.parametrize("noise", [False, True], ids=["plain", "noisy embeddings"])
@pytest.mark.parametrize(
    "method",
    [SAM(rho=0.5), GSAM(rho=0.5), DeltaSAM(rho=0.5), DeltaSAM(rho=0.5, weighting=Directional())],
    ids=["sam", "gsam", "delta-sam", "directional"],
)
def test_the_view_that_stays_at_w_is_computed_again_at_w(method: Method, noise: bool) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Encoder(checkpointed=checkpointed).double().train()
        first, second = torch.randn(6, 5).double(), torch.randn(6, 5).double()
        objective: Any = Contrastive(temperature=0.5)
        objective = EmbeddingNoise(objective, scale=0.3, embeddings="outside") if noise else objective
        deepcopy(method).backward(model, (first, second), objective)  # a copy: every step draws other directions
        found.append(grads(model))
    assert relative_error(found[1], found[0]) < 1e-12


class Tokens(nn.Module):
    """The embedding layer is in the part that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(checkpoint(lambda ids: self.embed(ids).tanh().mean(1), ids, use_reentrant=False))


@pytest.mark.parametrize("wrap", [EmbeddingNoise, R3F, VAT, lambda o, **k: SMART(o, mu=0, **k), None])
def test_noise_on_embeddings_that_are_computed_again_is_refused(wrap: Any) -> None:
    model, batch = Tokens(), (torch.randint(9, (4, 3)), torch.tensor([0, 1, 2, 0]))
    objective: Any = Classification() if wrap is None else wrap(Classification(), embeddings="embed")
    method = FreeLB(embeddings="embed") if wrap is None else ERM()
    with pytest.raises(RuntimeError, match=r"activation checkpointing.*move it out"):
        method.backward(model, batch, objective)
    ERM().backward(model, batch, Classification())  # nothing is left behind


def test_a_torch_without_that_function_works_without_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("", "_impl"):  # the name since torch 2.14
        monkeypatch.delattr(f"torch.utils.checkpoint._checkpoint_without_reentrant_generator{suffix}", raising=False)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    batch = torch.randint(9, (4, 3)), torch.tensor([0, 1, 2, 0])
    with pytest.warns(UserWarning, match="unknown way"):
        FreeLB(embeddings="0").backward(model, batch, Classification())
    assert all(p.grad is not None for p in model.parameters())


class Adapted(nn.Module):
    """The trained parameters are inside a reentrant checkpoint, and perhaps in a head after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).mean(1).requires_grad_()
        return self.head(checkpoint(lambda h: self.adapter(h).tanh(), h, use_reentrant=True)).squeeze(-1)


METHODS = [SAM(), DeltaSAM(), DeltaSAM(weighting=OwnGradient()), PerInstanceSAM(), PerInstanceSAM(engine="loop")]
METHODS += [ASAM(), GSAM(), LookSAM(), ESAM(beta=1.0), SubsetSAM(), FisherSAM()]


@pytest.mark.parametrize("head", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_gradients_that_end_at_a_checkpoint_are_refused(method: Method, head: bool) -> None:
    model, ids = Adapted(), torch.randint(9, (4, 3))
    model.head.requires_grad_(head)
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError), match="use_reentrant=False"):
            method.backward(model, ids, lambda model, ids: model(ids) ** 2)
    ERM().backward(model, ids, lambda model, ids: model(ids) ** 2)
    assert model.adapter.weight.grad is not None


def test_parameters_outside_the_checkpoint_may_be_perturbed() -> None:
    model, ids = Adapted(), torch.randint(9, (4, 3))
    method = SAM(params=lambda name, p: name.startswith("head"))
    assert not method.backward(model, ids, lambda model, ids: model(ids) ** 2).skipped
