"""Several embedding layers in a step: one with a zero gradient does not stop the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam import TAVAT, Classification, FreeLB

IDS, LABELS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1], [2, 2, 3, 3]]), torch.tensor([0, 1, 2])


class Two(nn.Module):
    """Two layers, each with a factor in the output; with a factor of 0 the layer has no gradient."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Linear(4, 3)
        self.factors = first, second

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.factors
        return self.out((first * self.a(ids[:, :2]) + second * self.b(ids[:, 2:])).mean(1))


def is_embedding(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)


@pytest.mark.parametrize("kind", [FreeLB, TAVAT])
@pytest.mark.parametrize(
    ("factors", "skipped"), [((1.0, 1.0), False), ((1.0, 0.0), False), ((0.0, 1.0), False), ((0.0, 0.0), True)]
)
def test_a_step_is_skipped_if_no_layer_has_a_gradient(
    kind: type[FreeLB], factors: tuple[float, float], skipped: bool
) -> None:
    model = Two(*factors).double()
    step = kind(embeddings=is_embedding, adv_steps=2, adv_lr=0.1).backward(model, (IDS, LABELS), Classification())
    assert bool(step.skipped) is skipped


def test_an_instance_without_a_gradient_does_not_stop_the_others() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        counted = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
        return cross_entropy(model(batch[0]), batch[1], reduction="none") * counted

    model = Two(1.0, 1.0).double()
    method = FreeLB(embeddings=is_embedding, adv_steps=2, adv_lr=0.1, init_magnitude=0.0)
    step = method.backward(model, (IDS, LABELS), objective)
    assert not step.skipped
    assert (step.perturbed_losses > step.losses).tolist() == [True, False, True]
