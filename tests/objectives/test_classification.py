"""Classification and regression against the losses of Hugging Face's own heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from deltasam.objectives import Classification, Regression, Tokens
from helpers.tiny import classifier, labelled, sentences

LABELS = torch.tensor([2, 0, 1, 1])
KINDS = ["bert", "roberta", "distilbert"]


class Recorder(nn.Module):
    """Records the keywords of its call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: set[str] = set()

    def forward(self, **inputs):
        self.seen = set(inputs)
        return self.model(**inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_classification_is_hugging_faces_loss(kind):
    model, batch = classifier(kind, num_labels=3), labelled(LABELS)
    losses = Classification()(model, batch)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)
    alone = [Classification()(model, labelled_row(batch, i)).item() for i in range(4)]
    assert losses.tolist() == pytest.approx(alone, abs=1e-6)


def labelled_row(batch, i):
    return {key: value[i : i + 1] for key, value in batch.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_regression_is_hugging_faces_loss(kind):
    model, batch = classifier(kind, num_labels=1), labelled(torch.tensor([0.5, -1.0, 2.5, 4.0]))
    losses = Regression()(model, batch)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)


def test_regression_of_several_numbers_is_hugging_faces_loss():
    model = classifier(num_labels=3, problem_type="regression")
    batch = labelled(torch.randn(4, 3))
    assert Regression()(model, batch).mean().item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("squeeze", [True, False])
def test_regression_does_not_broadcast(shape, squeeze):
    x, y = torch.randn(4, 3), torch.randn(4)
    model = nn.Linear(3, 1)
    predict = (lambda m, b: m(b[0]).squeeze(-1)) if squeeze else None
    losses = Regression(predict=predict)(model, (x, y.view(shape)))
    torch.testing.assert_close(losses, (model(x).squeeze(-1) - y) ** 2)


def test_multi_label_is_hugging_faces_loss():
    model = classifier(num_labels=3, problem_type="multi_label_classification")
    batch = labelled(torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]))
    losses = Classification(multi_label=True)(model, batch)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)
    as_integers = {**batch, "labels": batch["labels"].long()}
    assert torch.equal(Classification(multi_label=True)(model, as_integers), losses)


def test_the_model_gets_everything_except_the_labels():
    model = Recorder(classifier(num_labels=3))
    batch = {**labelled(LABELS), "token_type_ids": torch.zeros(4, 7, dtype=torch.long)}
    Classification()(model, batch)
    assert model.seen == {"input_ids", "attention_mask", "token_type_ids"}
    assert "labels" in batch, "the user's batch was changed"


def test_plain_modules_tuples_of_inputs_and_callables():
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    linear, bilinear = nn.Linear(3, 2), nn.Bilinear(3, 3, 2)
    expected = F.cross_entropy(linear(x), y, reduction="none")
    assert torch.equal(Classification()(linear, (x, y)), expected)
    assert torch.equal(Classification()(linear, [x, y]), expected)
    assert torch.equal(Classification()(linear, ({"input": x}, y)), expected)
    assert torch.equal(Classification(labels="label")(linear, {"input": x, "label": y}), expected)
    graph = SimpleNamespace(x=x, y=y)
    own = Classification(predict=lambda model, b: model(b.x), labels=lambda b: b.y)
    assert torch.equal(own(linear, graph), expected)
    pair = Classification()(bilinear, ((x, x), y))
    assert torch.equal(pair, F.cross_entropy(bilinear(x, x), y, reduction="none"))


def test_outputs_as_dictionary_and_tuple():
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    linear = nn.Linear(3, 2)
    expected = Classification()(linear, (x, y))
    for wrap in (lambda t: {"logits": t}, lambda t: (t, None), lambda t: SimpleNamespace(logits=t)):
        objective = Classification(predict=lambda m, b, wrap=wrap: wrap(m(b[0])))
        assert torch.equal(objective(linear, (x, y)), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_the_mixture_of_the_target_and_the_uniform_distribution(smoothing):
    logits, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 2, 2, 0])
    target = (1 - smoothing) * F.one_hot(y, 4).double() + smoothing / 4
    expected = -(target * logits.log_softmax(-1)).sum(-1)
    losses = Classification(label_smoothing=smoothing).losses(logits, (None, y))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_losses_and_divergences_are_float32_at_least(dtype):
    logits, y = torch.randn(4, 3).to(dtype), torch.tensor([0, 1, 2, 1])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    losses = Classification().losses(logits, (None, y))
    assert losses.dtype == exact
    torch.testing.assert_close(losses, F.cross_entropy(logits.to(exact), y, reduction="none"))
    assert Classification().divergence(logits, logits * 2, None).dtype == exact
    assert Regression().losses(logits[:, :1], (None, y)).dtype == exact
    assert Regression().divergence(logits, logits * 2, None).dtype == exact
    assert Classification(multi_label=True).divergence(logits, logits * 2, None).dtype == exact
    assert Classification().directed(logits, logits * 2, None).dtype == exact


@pytest.mark.parametrize("kind", ["one label", "several labels", "tokens"])
def test_the_symmetric_divergence_is_the_mean_of_both_directions(kind):
    """It equals a loop over the distributions; half precision is converted to float32 first."""
    a, b = torch.randn(2, 5, 4, 3, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 0, 1], [0, -100, -100, -100], [-100, 1, 1, -100], [2, 2, 2, 2], [0, 1, 2, -100]])
    objective = Tokens() if kind == "tokens" else Classification(multi_label=kind == "several labels")
    if kind != "tokens":
        a, b = a[:, 0], b[:, 0]
    batch = (None, labels)
    p, q = (
        torch.stack([x.sigmoid(), 1 - x.sigmoid()], -1) if kind == "several labels" else x.softmax(-1) for x in (a, b)
    )
    wanted = {
        "one label": lambda: kl(p, q),
        "several labels": lambda: kl(p, q).mean(-1),
        "tokens": lambda: torch.where(labels != -100, kl(p, q), 0.0).sum(-1) * 5 / (labels != -100).sum(),
    }[kind]()
    found = objective.directed(a, b, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    both = 0.5 * (found + objective.directed(b, a, batch))
    torch.testing.assert_close(objective.divergence(a, b, batch), both, rtol=1e-10, atol=0)
    low = [x.bfloat16() for x in (a, b)]
    whole = objective.directed(*(x.float() for x in low), batch)
    assert torch.equal(objective.directed(*low, batch), whole)


def test_bf16_autocast_gives_hugging_faces_loss():
    model, batch = classifier(num_labels=3), labelled(LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, own = Classification()(model, batch), model(**batch)
    assert own.logits.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(own.loss.item(), abs=1e-6)


def test_float64_stays_and_the_gradient_is_hugging_faces():
    model, batch = classifier(num_labels=3).double(), labelled(LABELS)
    losses = Classification()(model, batch)
    assert losses.dtype == torch.float64
    params = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(losses.mean(), params, allow_unused=True)
    own = torch.autograd.grad(model(**batch).loss, params, allow_unused=True)
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def test_divergences_against_their_definitions():
    a, b = torch.randn(2, 5, 3, dtype=torch.float64)
    p, q = a.softmax(-1), b.softmax(-1)
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(Classification().divergence(a, b, None), 0.5 * (kl(p, q) + kl(q, p)), **close)
    p, q = (torch.stack([x.sigmoid(), 1 - x.sigmoid()], -1) for x in (a, b))
    expected = 0.5 * (kl(p, q) + kl(q, p)).mean(-1)
    torch.testing.assert_close(Classification(multi_label=True).divergence(a, b, None), expected, **close)
    torch.testing.assert_close(Regression().divergence(a[:, :1], b[:, :1], None), (a[:, 0] - b[:, 0]) ** 2, **close)
    torch.testing.assert_close(Regression().divergence(a[:, 0], b[:, 0], None), (a[:, 0] - b[:, 0]) ** 2, **close)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 6), classes=st.integers(2, 5), smoothing=st.floats(0, 0.9), scale=st.floats(0, 30), data=st.data()
)
def test_permuting_the_batch_permutes_the_losses(n, classes, smoothing, scale, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = scale * torch.randn(n, classes, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    objective = Classification(label_smoothing=smoothing)
    losses = objective.losses(logits, (None, labels))
    torch.testing.assert_close(objective.losses(logits[order], (None, labels[order])), losses[order])
    assert bool((losses >= 0).all())
    assert bool(losses.isfinite().all())
    divergence = objective.divergence(logits, logits.flip(0), None)
    torch.testing.assert_close(objective.divergence(logits.flip(0), logits, None), divergence)
    assert bool((divergence >= 0).all())
    assert torch.equal(objective.divergence(logits, logits, None), torch.zeros(n))


def test_under_torch_func():
    model, x, y = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    weights = dict(model.named_parameters())
    direction = {name: torch.randn_like(p) for name, p in weights.items()}

    def loss(params, inputs, label):
        return Classification()(lambda z: torch.func.functional_call(model, params, (z,)), (inputs, label))

    _, slope = torch.func.jvp(lambda p: loss(p, x, y), (weights,), (direction,))
    rows = torch.func.vmap(torch.func.grad(lambda p, a, b: loss(p, a[None], b[None]).sum()), (None, 0, 0))
    per_instance = rows({n: p.detach() for n, p in weights.items()}, x, y)
    expected = sum((per_instance[n].flatten(1) * direction[n].flatten()).sum(1) for n in weights)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


BAD = {
    "no labels key": (Classification(), sentences(), "no key 'labels', only .*attention_mask.*labels="),
    "labels None": (Classification(), {**sentences(), "labels": None}, "must be a tensor, but are a NoneType"),
    "three parts": (Classification(), (1, 2, 3), "tuple of length 3.*predict="),
    "a tensor": (Classification(), torch.zeros(2), "a tensor of shape .*predict="),
    "float labels": (Classification(), labelled(torch.rand(4)), "torch.float32.*Regression"),
    "too large": (Classification(), labelled(torch.tensor([0, 3, 1, 1])), "contain 3, but the model has 3 classes"),
    "negative": (Classification(), labelled(torch.tensor([0, -100, 1, 1])), "contain -100"),
    "labels (N, 1)": (Classification(), labelled(LABELS[:, None]), r"shape \(4, 1\).*must have \(N,\)"),
    "labels (N, T)": (Classification(), labelled(torch.zeros(4, 7).long()), r"Tokens\(\)"),
    "multi-label shape": (Classification(multi_label=True), labelled(LABELS), r"labels must be \(N, C\)"),
    "multi-label ignored": (Classification(multi_label=True), labelled(torch.full((4, 3), -100)), "contain -100"),
    "num_labels 3": (Regression(), labelled(torch.rand(4)), r"predicts \(4, 3\).*num_labels=1"),
    "bool": (Regression(), labelled(torch.ones(4).bool()), "torch.bool"),
}


@pytest.mark.parametrize(("objective", "batch", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches(objective, batch, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        objective(classifier(num_labels=3), batch)


def test_one_class_raises():
    with pytest.raises(ValueError, match="one class"):
        Classification()(classifier(num_labels=1), labelled(torch.zeros(4).long()))


def test_a_model_without_logits():
    class Odd(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(TypeError, match=r"keys .*'scores'.*no tensor 'logits'.*predict="):
        Classification()(Odd(), (torch.zeros(2, 2), torch.zeros(2).long()))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_bad_smoothing(smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
        Classification(label_smoothing=smoothing)


def test_smoothing_of_several_labels_is_refused():
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1 with multi_label"):
        Classification(label_smoothing=0.1, multi_label=True)
