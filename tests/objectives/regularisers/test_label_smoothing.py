"""Label smoothing by name: the same losses as the option of the objective, inside wrappers too."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from deltasam import CausalLM, Classification, EmbeddingNoise, LabelSmoothing, RDrop, Regression, Seq2Seq


def test_losses_are_those_of_the_smoothed_labels() -> None:
    model, batch = nn.Linear(3, 4).double(), (torch.randn(5, 3).double(), torch.tensor([0, 3, 1, 2, 2]))
    logs = model(batch[0]).log_softmax(-1)
    expected = torch.stack([-0.7 * logs[i, y] - 0.3 * logs[i].mean() for i, y in enumerate(batch[1])])
    torch.testing.assert_close(LabelSmoothing(Classification(), smoothing=0.3)(model, batch), expected)


def test_tokens_are_smoothed_over_the_vocabulary() -> None:
    model, tokens = nn.Embedding(7, 7).double(), torch.tensor([[1, 2, 3], [4, 5, -100]])
    batch = (tokens.clamp(min=0), tokens)
    found = LabelSmoothing(CausalLM(), smoothing=0.1)(model, batch)
    torch.testing.assert_close(found, CausalLM(label_smoothing=0.1)(model, batch))
    assert not torch.allclose(found, CausalLM()(model, batch))


def test_the_innermost_objective_is_smoothed() -> None:
    made = LabelSmoothing(RDrop(EmbeddingNoise(Classification(), scale=0.2), alpha=0.5), smoothing=0.1)
    assert made.objective == RDrop(EmbeddingNoise(Classification(label_smoothing=0.1), scale=0.2), alpha=0.5)


@dataclass(frozen=True, kw_only=True)
class WithWeights(Classification, nn.Module):
    pass


def test_objectives_that_cannot_be_smoothed() -> None:
    with pytest.raises(ValueError, match=r"objective=Regression\): has no classes"):
        LabelSmoothing(Regression())
    with pytest.raises(ValueError, match=r"Seq2Seq has label_smoothing=0.1 already"):
        LabelSmoothing(Seq2Seq(label_smoothing=0.1), smoothing=0.2)
    with pytest.raises(ValueError, match=r"label_smoothing is 1.5"):
        LabelSmoothing(Classification(), smoothing=1.5)
    with pytest.raises(ValueError, match="multi_label"):
        LabelSmoothing(Classification(multi_label=True))
    with pytest.raises(ValueError, match=r"WithWeights.*weights of its own"):
        LabelSmoothing(WithWeights())
