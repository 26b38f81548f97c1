"""The state of a method belongs to one model: another model raises one clear error, and its remedy works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, TAT, TAVAT, FisherSAM, LookSAM, Method
from deltasam.objectives import Classification
from deltasam.objectives.regularisers import SMART


def model_of(words: int = 9, width: int = 4, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Embedding(words, width), nn.Flatten(), nn.Linear(2 * width, classes))


def batch_of(words: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[0, words - 1], [1, 2], [3, 0], [2, words - 1]]), torch.arange(4) % classes


OTHERS: list[tuple[Method, dict[str, int], str]] = [
    (LookSAM(k=2), {"width": 6}, r"'0\.weight'.* \(9, 4\).* \(9, 6\)"),
    (LookSAM(k=2), {"words": 12}, r"'0\.weight'.* \(9, 4\).* \(12, 4\)"),
    (FisherSAM(), {"width": 1}, r"'0\.weight'.* \(9, 4\).* \(9, 1\)"),  # could be broadcast
    (TAVAT(embeddings="0"), {"words": 12}, r"'vocabulary'.* \(9, 4\).* \(12, 4\)"),
    (TAVAT(embeddings="0"), {"width": 2}, r"'vocabulary'.* \(9, 4\).* \(9, 2\)"),
    (TAT(embeddings="0"), {"classes": 2}, r"'confusion'.* \(3, 3\).* \(2, 2\)"),
    (TAT(embeddings="0"), {"classes": 5}, r"'confusion'.* \(3, 3\).* \(5, 5\)"),
]


@pytest.mark.parametrize(("method", "sizes", "message"), OTHERS, ids=lambda value: str(value)[:20])
def test_the_state_of_another_model(method: Method, sizes: dict[str, int], message: str) -> None:
    method.load_state_dict({})
    method.backward(model_of(), batch_of(9, 3), Classification())
    other, batch = model_of(**sizes), batch_of(sizes.get("words", 9), sizes.get("classes", 3))
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(ValueError, match=rf"{type(method).__name__}.*{message}.*load_state_dict\(\{{\}}\)"):
        method.backward(other, batch, Classification())
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(other.parameters(), before, strict=True))
    method.load_state_dict({})
    method.backward(other, batch, Classification())


@pytest.mark.parametrize("change", [lambda state: state, dict], ids=["the same", "a copy"])
def test_a_teacher_of_another_model(change: Callable[[Any], Any]) -> None:
    objective = SMART(Classification(), embeddings="0", total_steps=10)
    ERM().backward(model_of(), batch_of(9, 3), objective)
    other = SMART(Classification(), embeddings="0", total_steps=10)
    other.load_state_dict(change(objective.state_dict()))
    with pytest.raises(ValueError, match=r"another model.*'0\.weight'.*\(12, 4\).*\(9, 4\)"):
        ERM().backward(model_of(words=12), batch_of(12, 3), other)
