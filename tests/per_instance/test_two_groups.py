"""One instance may be read right by chance: a second one is compared, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM


class Distances(nn.Module):
    """Mixes positions by a table of distances, (T, T), as T5 does: for N = T it could be of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias, self.out = nn.Embedding(11, 6), nn.Embedding(32, 1), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        distances = (places[:, None] - places[None]).abs()
        later = torch.ones_like(distances, dtype=torch.bool).triu(1)
        scores = self.bias(distances).squeeze(-1).masked_fill(later, -torch.inf)
        mixed = torch.softmax(scores, -1) @ self.words(ids)
        found: Tensor = self.out(torch.tanh(mixed))
        return found


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Instance 0 has a target at its first position alone, which sees no other, and the largest gradient."""
    ids, weights = batch
    each = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
    return (each.view_as(ids) * weights).sum(1)


def test_an_instance_that_uses_one_position_does_not_vouch_for_the_others() -> None:
    torch.manual_seed(0)
    ids, weights = torch.randint(11, (4, 4)), torch.ones(4, 4).double()
    weights[0] = torch.tensor([50.0, 0.0, 0.0, 0.0])
    gradients = []
    for engine in ("low-rank", "loop"):
        torch.manual_seed(1)
        model = Distances().double()
        PerInstanceSAM(rho=0.3, engine=engine).backward(model, (ids, weights), losses)
        gradients.append([p.grad for p in model.parameters()])
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)
