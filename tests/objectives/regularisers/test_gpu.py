"""On a CUDA device: no synchronization, shared masks from the device's generator, the same numbers as on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import ERM, R3F, SAM, SMART, TAT, TAVAT, VAT, Classification, EmbeddingNoise, FreeLB, Objective, RDrop
from helpers.problems import grads, relative_error

pytestmark = pytest.mark.gpu


class Tagger(nn.Module):
    """Embeddings, dropout and two layers, without synchronization."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.hidden(self.dropout(self.words(ids))).tanh()
        return self.out((words * attention_mask.unsqueeze(-1)).mean(1))


def problem(device: str, dropout: float = 0.0) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tagger(dropout).double()
    ids = torch.randint(1, 50, (6, 8)) * (torch.arange(8) < torch.randint(3, 9, (6, 1)))
    inputs = (ids.to(device), (ids != 0).to(device))
    return model.to(device), (inputs, torch.randint(3, (6,)).to(device))


WHERE = {"embeddings": "words"}
WRAPPERS: dict[str, Callable[[Objective], Objective]] = {
    "rdrop": RDrop,
    "rdrop-two": lambda o: RDrop(o, passes="two"),
    "noise": lambda o: EmbeddingNoise(o, **WHERE),
    "r3f": lambda o: R3F(o, **WHERE),
    "vat": lambda o: VAT(o, **WHERE),
    "smart": lambda o: SMART(o, total_steps=10, **WHERE),
}
METHODS = {"freelb": FreeLB, "tat": TAT, "tavat": TAVAT}


@pytest.mark.parametrize("name", [*WRAPPERS, *METHODS])
def test_no_synchronization(name: str) -> None:
    model, batch = problem("cuda", dropout=0.1)
    objective = WRAPPERS[name](Classification()) if name in WRAPPERS else Classification()
    method = METHODS[name](**WHERE) if name in METHODS else SAM()
    method.backward(model, batch, objective)  # the first step may synchronize
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        method.backward(model, batch, objective)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", METHODS)
def test_same_numbers_as_on_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model, batch = problem(device)
        method = METHODS[name](init_magnitude=0.0, adv_lr=0.5, **WHERE)
        for _ in range(3):
            method.backward(model, batch, Classification())
        results.append({n: g.cpu() for n, g in grads(model).items()})
    assert relative_error(results[1], results[0]) < 1e-9


@pytest.mark.parametrize("name", ["vat", "smart"])
def test_passes_inside_an_objective_share_their_masks(name: str) -> None:
    """With radius 0 and a teacher equal to the student, only different masks could change the loss."""
    zero = {
        "vat": lambda o: VAT(o, epsilon=0.0, **WHERE),
        "smart": lambda o: SMART(o, epsilon=0.0, total_steps=9, **WHERE),
    }
    model, batch = problem("cuda", dropout=0.5)
    torch.manual_seed(1)
    wanted = ERM().backward(model, batch, Classification()).losses
    torch.manual_seed(1)
    found = ERM().backward(model, batch, zero[name](Classification())).losses
    torch.testing.assert_close(found, wanted)
