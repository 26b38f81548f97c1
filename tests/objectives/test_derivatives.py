"""Losses and divergences have correct derivatives in every mode that the methods and weightings use."""

from __future__ import annotations

import pytest
import torch
from torch.func import jacrev, jvp

from deltasam.objectives import CausalLM, Classification, Contrastive, Regression, Seq2Seq, Tokens

TOKENS = torch.tensor([[1, 2, -100], [3, 0, 4]])
CASES = {
    "classification": (Classification(), (3, 5), torch.tensor([1, 4, 0])),
    "smoothed": (Classification(label_smoothing=0.1), (3, 5), torch.tensor([1, 4, 0])),
    "multi-label": (Classification(multi_label=True), (3, 2), torch.tensor([[1, 0], [0, 0], [1, 1]])),
    "regression": (Regression(), (3, 1), torch.tensor([1.0, 4.0, 0.5])),
    "tokens": (Tokens(label_smoothing=0.1), (2, 3, 5), TOKENS),
    "causal": (CausalLM(), (2, 3, 5), TOKENS),
    "seq2seq": (Seq2Seq(reduction="sequence"), (2, 3, 5), TOKENS),
    "contrastive": (Contrastive(temperature=0.5), (2, 3, 4), None),
}


@pytest.fixture(params=list(CASES))
def along(request):
    """The losses and the divergence along a curve t -> outputs(t), in float64."""
    objective, shape, labels = CASES[request.param]
    a, b, c = torch.randn(3, *shape, dtype=torch.float64)
    batch = (None, labels)

    def curve(t):
        moved = a + t * b + t**2 * c
        return torch.cat([objective.losses(moved, batch), objective.divergence(moved, a + b, batch)])

    return curve


def test_nested_forward_mode_agrees_with_reverse_mode(along):
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    first, second = jvp(lambda t: jvp(along, (t,), (one,))[1], (zero,), (one,))
    torch.testing.assert_close(first, jacrev(along)(zero), rtol=0, atol=1e-12)
    torch.testing.assert_close(second, jacrev(jacrev(along))(zero), rtol=0, atol=1e-12)


def test_reverse_mode_agrees_with_finite_differences(along):
    t = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(along, (t,))
    assert torch.autograd.gradgradcheck(along, (t,))


def test_compiles_without_a_break():
    """Checks that read labels are skipped. The test runs the tracer only and generates no code."""
    objective = Tokens(label_smoothing=0.1)
    outputs, batch = torch.randn(2, 3, 5), (None, TOKENS)
    compiled = torch.compile(objective.losses, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs, batch), objective.losses(outputs, batch))
