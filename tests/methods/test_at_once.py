"""``PerInstanceSAM(at_once=...)``: the step over parts of the batch is the step over the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deltasam import MicroBatches, PerInstanceSAM

N = 7


class MeanOfItems:
    """Squares, weighted so that their mean is one over all items of the batch, as a mean over tokens is."""

    separable = True

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, items = batch["x"], batch["items"]
        return (model(x) ** 2).sum(1) * items * (items.shape[0] / items.sum())

    def items(self, batch: Any) -> Any:
        return batch["items"].sum()


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, dtype=torch.float64, generator=generator)
    return {"x": x, "items": torch.arange(1.0, N + 1, dtype=torch.float64)}


def taken(batch: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    step = PerInstanceSAM(rho=0.3, **options).backward(model, batch, MeanOfItems(), scale=8.0)
    return [p.grad for p in model.parameters() if p.grad is not None], step


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
@pytest.mark.parametrize(("at_once", "group"), [(1, 1), (2, 1), (3, 1), (7, 1), (100, 1), (4, 2), (3, 2), (1, 3)])
def test_parts_give_the_step_of_the_batch(at_once: int, group: int, engine: str) -> None:
    whole, parts = (taken(data(), group=group, engine=engine, at_once=most) for most in (None, at_once))
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-9, atol=1e-12)
    for name in ("losses", "perturbed_losses", "grad_norm"):
        torch.testing.assert_close(getattr(parts[1], name), getattr(whole[1], name), rtol=1e-9, atol=1e-12)


def test_a_sweep_over_parts_is_one_pass() -> None:
    whole, parts = (taken(data(), at_once=most)[1] for most in (None, 2))
    assert (parts.forwards, parts.backwards) == (whole.forwards, whole.backwards) == (2, 2)


def test_micro_batches_are_cut_further() -> None:
    batch = data()
    halves = MicroBatches({k: v[s] for k, v in batch.items()} for s in (slice(0, 4), slice(4, N)))
    whole, parts = taken(halves), taken(halves, at_once=2)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-9, atol=1e-12)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        PerInstanceSAM(at_once=1).backward(
            nn.Linear(1, 1), ["text"], lambda model, batch: model(torch.ones(1, 1))[:, 0]
        )
