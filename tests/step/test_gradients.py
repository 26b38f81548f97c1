"""``set_aside`` adds the earlier gradients again, dense and sparse ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import Classification
from deltasam.methods import LookSAM
from deltasam.step import gradients as module
from deltasam.step.gradients import added, set_aside


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(4, 3)
        self.words = nn.Embedding(9, 4, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(ids)).mean(1))


def test_look_sam_accumulates_into_sparse_gradients() -> None:
    batch = (torch.randint(9, (6, 3)), torch.randint(3, (6,)))
    found = []
    for sparse in (True, False):
        model, method = Words(sparse).double(), LookSAM(k=2)
        for _ in range(4):
            method.backward(model, batch, Classification())
        found.append([p.grad.to_dense() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", ["dense", "sparse"])
@pytest.mark.parametrize("second", ["dense", "sparse"])
def test_every_pair_adds_up(first: str, second: str) -> None:
    a, b = torch.randn(4, 2), torch.randn(4, 2)
    one, other = (t.to_sparse(1) if kind == "sparse" else t.clone() for t, kind in ((a, first), (b, second)))
    total = added(one, other)
    assert total is not None
    torch.testing.assert_close(total.to_dense(), a + b)


def test_a_sum_that_fails_leaves_all_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words(sparse=True)
    params = dict(model.named_parameters())
    Classification()(model, (torch.randint(9, (6, 3)), torch.randint(3, (6,)))).mean().backward()
    before = {name: p.grad.to_dense().clone() for name, p in params.items()}

    def broken(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        raise RuntimeError("no sum")

    def fill() -> None:
        with set_aside(params):
            for p in params.values():
                p.grad = torch.ones_like(p)

    monkeypatch.setattr(module, "added", broken)
    with pytest.raises(RuntimeError, match="no sum"):
        fill()
    assert all(torch.equal(p.grad.to_dense(), before[name]) for name, p in params.items())


def test_a_dense_gradient_keeps_its_address() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    earlier = p.grad
    with set_aside({"p": p}):
        p.grad = torch.full((3,), 2.0)
    assert p.grad is earlier
    assert torch.equal(p.grad, torch.full((3,), 3.0))


def test_a_gradient_of_two_parameters_is_added_up_for_each() -> None:
    """Autograd gives both terms of a sum the same tensor: an addition in place would count it twice."""
    a, b, c = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3))
    collected, wanted = module.Gradient([a, b, c]), torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        x = torch.randn(3, dtype=torch.float64)
        collected.add(((a + b) * x).sum())
        wanted += x
        assert collected.total[2] is None, k
    for found in collected.total[:2]:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert a.grad is b.grad is None
