"""The contrastive objective equals NT-Xent, and the adversary on one view equals its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deltasam.objectives import Classification, Contrastive
from helpers.tiny import encoder, sentences


def ntxent(rows: torch.Tensor, temperature: float) -> list[float]:
    """pytorch-metric-learning's NTXentLoss with labels (0..N-1, 0..N-1), anchor by anchor."""
    rows = rows.double() / rows.double().norm(dim=-1, keepdim=True)
    count, n = len(rows), len(rows) // 2
    anchors = []
    for a in range(count):
        score = [float(rows[a] @ rows[b]) / temperature for b in range(count)]
        largest = max(score[b] for b in range(count) if b != a)
        positive = math.exp(score[(a + n) % count] - largest)
        negatives = sum(math.exp(score[b] - largest) for b in range(count) if b % n != a % n)
        anchors.append(-math.log(positive / (positive + negatives) + torch.finfo(torch.float64).tiny))
    return anchors


@settings(deadline=None, max_examples=30)
@given(n=st.integers(2, 5), temperature=st.sampled_from([0.04, 0.5, 2.0]), seed=st.integers(0, 10**6))
def test_losses_are_the_halves_of_ntxents_rows(n, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(2, n, 6, generator=generator, dtype=torch.float64)
    anchors = ntxent(outputs.flatten(0, 1), temperature)
    losses = Contrastive(temperature=temperature).losses(outputs, None)
    expected = [0.5 * (anchors[i] + anchors[i + n]) for i in range(n)]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    assert losses.mean().item() == pytest.approx(sum(anchors) / (2 * n), abs=1e-12)
    order = torch.randperm(n, generator=generator)
    permuted = Contrastive(temperature=temperature).losses(outputs[:, order], None)
    torch.testing.assert_close(permuted, losses[order], rtol=0, atol=1e-12)


def views(n=4):
    return {"first": sentences(n, seed=3), "second": sentences(n, 6, seed=4)}


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("pooling", ["mean-all", "mean", "cls"])
def test_pooling_of_hugging_face_encoders(kind, pooling):
    model, batch = encoder(kind), views()
    outputs = Contrastive(pooling=pooling).forward(model, batch)
    assert outputs.shape == (2, 4, 16)
    for got, view in zip(outputs, batch.values(), strict=True):
        hidden = model(**view).last_hidden_state
        for i, length in enumerate(view["attention_mask"].sum(1).tolist()):
            rows = {"mean-all": hidden[i], "mean": hidden[i, :length], "cls": hidden[i, :1]}[pooling]
            torch.testing.assert_close(got[i], rows.mean(0), rtol=0, atol=1e-6)


def test_forms_of_batches_and_encoders():
    x, y = torch.randn(2, 4, 5)
    model = nn.Linear(5, 3)
    expected = Contrastive()(model, (x, y))
    assert torch.equal(Contrastive()(model, [x, y]), expected)
    assert torch.equal(Contrastive()(model, {"first": x, "second": y}), expected)
    assert torch.equal(Contrastive()(model, {"first": {"input": x}, "second": {"input": y}}), expected)
    own = Contrastive(predict=lambda m, view: {"last_hidden_state": m(view["text"])})
    assert torch.equal(own(model, ({"text": x}, {"text": y})), expected)


def test_autocast_does_not_reach_the_cosines():
    outputs = torch.randn(2, 8, 16)
    expected = Contrastive().losses(outputs, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = Contrastive().losses(outputs, None)
    assert torch.equal(losses, expected)
    assert Contrastive().losses(outputs.bfloat16(), None).dtype == torch.float32
    assert Contrastive().losses(outputs.double(), None).dtype == torch.float64


def test_divergence_is_one_minus_the_cosine():
    a, b = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    expected = (1 - nn.functional.cosine_similarity(a, b, dim=-1)).mean(0)
    torch.testing.assert_close(Contrastive().divergence(a, b, None), expected, rtol=0, atol=1e-12)
    assert Contrastive().divergence(a, a, None).tolist() == [0.0] * 4


def test_the_unperturbed_part():
    model, batch = encoder(), views()
    held = Contrastive().unperturbed(model, batch)
    assert torch.equal(Contrastive().complete(model, batch, held), Contrastive().forward(model, batch))
    assert Contrastive(adversary="both").unperturbed(model, batch) is None
    assert Classification().unperturbed(model, batch) is None
    assert Classification.separable
    assert not Contrastive.separable
    with pytest.raises(NotImplementedError, match=r"Classification.*forward\(model, batch\)"):
        Classification().complete(model, batch, held)


def test_the_adversary_on_the_second_view_from_the_two_hooks():
    """h1 = enc(x1; w), h2 = enc(x2; w + eps): the gradient reaches w through both."""
    model, batch, objective = encoder().double(), views(), Contrastive(temperature=0.5)
    params = dict(model.named_parameters())
    eps = {name: 0.01 * torch.randn_like(p) for name, p in params.items()}

    moved = {name: p + eps[name] for name, p in params.items()}
    first = objective.encode(model, batch["first"])
    second = torch.func.functional_call(model, moved, (), batch["second"]).last_hidden_state.mean(1)
    wanted = objective.losses(torch.stack((first, second)), batch)
    expected = torch.autograd.grad(wanted.mean(), list(params.values()), allow_unused=True)

    # As a method does it: the part at w, the move, the perturbed pass, the move back, the rest of the gradient.
    with torch.no_grad():
        held = objective.unperturbed(model, batch).requires_grad_()
    origin = {name: p.data for name, p in params.items()}
    for name, p in params.items():
        p.data = p.data + eps[name]
    losses = objective.losses(objective.complete(model, batch, held), batch)
    losses.mean().backward()
    for name, p in params.items():
        p.data = origin[name]
    objective.unperturbed(model, batch).backward(held.grad)

    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-12)
    for p, gradient in zip(params.values(), expected, strict=True):
        assert (p.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-12)


X = torch.randn(4, 5)
BAD = {
    "one view": (Contrastive(), {"first": X}, "keys \\['first'\\].*'first' and 'second'"),
    "three views": (Contrastive(), (X, X, X), "tuple of length 3"),
    "different sizes": (Contrastive(), (X, X[1:]), r"\(4, 3\), the second \(3, 3\).*same instances"),
    "one instance": (Contrastive(), (X[:1], X[:1]), "no negatives.*drop_last"),
    "no mask": (Contrastive(pooling="mean"), (X[:, None], X[:, None]), "needs 'attention_mask'.*mean-all"),
    "four dimensions": (Contrastive(), (X[:, None, None], X[:, None, None]), r"\(4, 1, 1, 3\).*\(N, T, H\)"),
}


@pytest.mark.parametrize(("objective", "batch", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches(objective, batch, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        objective(nn.Linear(5, 3), batch)


def test_bad_arguments():
    for options in (
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"pooling": "max"},
        {"adversary": "first"},
    ):
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name}( is |=){value!r}"):
            Contrastive(**options)
    with pytest.raises(ValueError, match=r"\(4, 5\), but must have \(2, N, H\)"):
        Contrastive().losses(X, None)


def test_a_text_without_tokens_has_finite_losses():
    """Its mean over no tokens is an embedding of zeros."""
    model, batch = encoder("bert"), views()
    whole = Contrastive(pooling="mean").forward(model, batch)
    batch["second"]["attention_mask"][1] = 0
    outputs = Contrastive(pooling="mean").forward(model, batch)
    assert outputs[1, 1].eq(0).all()
    torch.testing.assert_close(outputs[:, [0, 2, 3]], whole[:, [0, 2, 3]])
    assert Contrastive(pooling="mean").losses(outputs, batch).isfinite().all()
