"""Models that make constants on the host, captured on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.speed.capture import Captured

pytestmark = pytest.mark.gpu


class Positions(nn.Module):
    """As MPNet in older versions of transformers: positions are made on the host and copied; here also written to."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(32, 8), nn.Linear(8, 3)
        self.offset = 0

    def forward(self, ids: Tensor) -> Tensor:
        places = (torch.arange(ids.shape[1]) + self.offset).to(ids.device)
        places += 1
        return self.head((self.tokens(ids) + self.places(places)).tanh().mean(1))


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gradients(method: Any, model: nn.Module, batch: Any, objective: Any) -> list[Tensor]:
    model.zero_grad()
    method.backward(model, batch, objective)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", [SAM, DeltaSAM, PerInstanceSAM])
def test_a_captured_step_reads_them(method: type[Method]) -> None:
    torch.manual_seed(0)
    model = Positions().cuda().double()  # delta-SAM's weights magnify what is rounded
    captured, ordinary = Captured(method()), method()
    for _ in range(5):
        batch = (torch.randint(11, (4, 7)).cuda(), torch.randint(3, (4,)).cuda())
        found, wanted = (gradients(each, model, batch, objective) for each in (captured, ordinary))
        for here, there in zip(found, wanted, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-9)
    assert (captured.report.replayed, captured.report.obstacles) == (4, {})


def test_values_that_change_are_not_constants() -> None:
    model = Positions().cuda()
    captured = Captured(SAM())
    batch = (torch.randint(11, (4, 7)).cuda(), torch.randint(3, (4,)).cuda())
    captured.backward(model, batch, objective)
    model.offset = 1
    with pytest.warns(UserWarning, match="not captured"):
        captured.backward(model, batch, objective)
    assert captured.report.replayed == 0


def test_mpnet() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MPNetConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.MPNetForSequenceClassification(config).cuda().train()
    captured = Captured(PerInstanceSAM())
    for _ in range(5):
        ids = torch.randint(4, 97, (3, 9)).cuda()
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1]).cuda()}
        found, wanted = (gradients(each, model, batch, Classification()) for each in (captured, PerInstanceSAM()))
        for here, there in zip(found, wanted, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-6)
    assert (captured.report.replayed, captured.report.obstacles) == (4, {})
