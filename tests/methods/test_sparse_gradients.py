"""Sparse embeddings keep sparse gradients, which SparseAdam requires."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from deltasam import ASAM, ERM, ESAM, GSAM, SAM, WSAM, DeltaSAM, FisherSAM, LookSAM, Method, PerInstanceSAM, SubsetSAM

METHODS = [ERM(), SAM(), DeltaSAM(), ASAM(), GSAM(), WSAM(), LookSAM(k=2), ESAM(), SubsetSAM(), FisherSAM()]
METHODS += [PerInstanceSAM()]


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5, sparse=sparse)
        self.unused = nn.Embedding(3, 5, sparse=sparse)
        self.out = nn.Linear(5, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids).mean(1)).squeeze(-1)


def squares(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1) ** 2


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_as_dense_ones_with_the_same_values(method: Method, accumulate: bool) -> None:
    ids = torch.randint(9, (6, 4))
    found: list[list[Tensor]] = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model, own = Words(sparse=sparse).double(), deepcopy(method)
        found.append([])
        for _ in range(3):
            if not accumulate:
                model.zero_grad()
            own.backward(model, ids, squares)
            grad = model.embed.weight.grad
            assert grad is not None
            assert grad.is_sparse == sparse
            assert model.unused.weight.grad is None
            found[-1].append(grad.to_dense() if sparse else grad.clone())
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1)
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


@pytest.mark.parametrize("method", [GSAM(), WSAM(), LookSAM()], ids=lambda m: type(m).__name__)
def test_an_inf_is_kept_out_of_them_as_well(method: Method) -> None:
    model, ids = Words(sparse=True), torch.randint(9, (6, 4))
    with torch.no_grad():
        model.out.weight.fill_(1e30)
    method.backward(model, ids, squares)
    plain = deepcopy(model)
    plain.zero_grad()
    ERM().backward(plain, ids, squares)
    torch.testing.assert_close(model.embed.weight.grad.to_dense(), plain.embed.weight.grad.to_dense(), equal_nan=True)
