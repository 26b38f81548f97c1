"""Each regulariser against its formula, written out in float64 with ``inputs_embeds``, value and gradients to 1e-9."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam import R3F, SMART, VAT, Classification, EmbeddingNoise, NEFTune, RDrop, Regression, Tokens
from helpers.heads import head, no_dropout, texts

Logits = Callable[..., Tensor]


def problem(classes: int) -> tuple[nn.Module, dict[str, Tensor], Logits, Tensor]:
    """A BERT in float64 without dropout, a batch, the logits for perturbed embeddings, the mask of real tokens."""
    model, batch = no_dropout(head("bert", num_labels=classes)).double(), texts(classes=classes)
    for p in model.parameters():  # with the small initial values all predictions are nearly equal
        p.data.mul_(3)
    if classes == 1:
        batch["labels"] = batch["labels"].double()
    mask = batch["attention_mask"].unsqueeze(-1).double()

    def logits(noise: Tensor | float = 0.0, stop: bool = False, net: nn.Module = model) -> Tensor:
        embedded = net.get_input_embeddings()(batch["input_ids"])
        embedded = embedded.detach() if stop else embedded
        return net(inputs_embeds=embedded + noise, attention_mask=batch["attention_mask"]).logits

    return model, batch, logits, mask


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    if outputs.shape[1] == 1:
        return (outputs[:, 0] - batch["labels"]) ** 2
    return cross_entropy(outputs, batch["labels"], reduction="none")


def kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.softmax(-1), q.softmax(-1)
    return (p * (p / q).log()).sum(-1)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """KL in both directions, or the squared difference."""
    return (a - b)[:, 0] ** 2 if a.shape[1] == 1 else kl(a, b) + kl(b, a)


def objective(classes: int):
    return Regression() if classes == 1 else Classification()


def agree(model: nn.Module, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    params = [p for p in model.parameters() if p.requires_grad]
    mine, theirs = (torch.autograd.grad(x.mean(), params, allow_unused=True) for x in (found, wanted))
    assert any(g is not None and g.abs().max() > 1e-4 for g in theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_embedding_noise(classes: int, kind: str) -> None:
    model, batch, logits, mask = problem(classes)
    torch.manual_seed(5)
    found = EmbeddingNoise(objective(classes), scale=0.3, noise=kind)(model, batch)
    torch.manual_seed(5)
    shape = (4, 6, 16)
    drawn = torch.empty(shape, dtype=torch.float64)
    drawn = drawn.uniform_(-0.3, 0.3) if kind == "uniform" else drawn.normal_(0, 0.3)
    agree(model, found, loss(logits(drawn * mask), batch))
    assert not torch.allclose(found, loss(logits(), batch))


@pytest.mark.parametrize("classes", [3, 1])
def test_neftune(classes: int) -> None:
    model, batch, logits, mask = problem(classes)
    noisy = NEFTune(objective(classes), alpha=3.0)
    torch.manual_seed(5)
    found = noisy(model.train(), batch)
    torch.manual_seed(5)
    drawn = torch.empty(4, 6, 16, dtype=torch.float64).uniform_(-1, 1) * mask
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) > 1  # padding must matter
    noise = torch.stack([row * 3.0 / (length * 16) ** 0.5 for row, length in zip(drawn, lengths, strict=True)])
    agree(model, found, loss(logits(noise), batch))
    assert torch.equal(noisy(model.eval(), batch), loss(logits(), batch))
    assert torch.equal(NEFTune(objective(classes), alpha=0.0)(model.train(), batch), loss(logits(), batch))


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("stop", [False, True])
def test_r3f(classes: int, stop: bool) -> None:
    model, batch, logits, mask = problem(classes)
    torch.manual_seed(5)
    found = R3F(objective(classes), eps=0.2, lam=0.7, detach_embeddings=stop)(model, batch)
    torch.manual_seed(5)
    noise = torch.empty(4, 6, 16, dtype=torch.float64).uniform_(-0.2, 0.2) * mask
    clean, noisy = logits(), logits(noise, stop)
    agree(model, found, loss(clean, batch) + 0.7 * distance(clean, noisy))


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_vat(classes: int, steps: int) -> None:
    model, batch, logits, mask = problem(classes)
    torch.manual_seed(5)
    found = VAT(objective(classes), alpha=0.9, epsilon=0.5, xi=0.1, steps=steps)(model, batch)
    torch.manual_seed(5)
    d = torch.empty(4, 6, 16, dtype=torch.float64).normal_() * mask
    clean = logits()
    directed = distance if classes == 1 else kl
    for i in range(steps + 1):
        for row in d:
            row /= row.norm()
        if i < steps:
            r = (0.1 * d).requires_grad_()
            (g,) = torch.autograd.grad(directed(clean.detach(), logits(r)).sum(), r)
            d = g * mask
    agree(model, found, loss(clean, batch) + 0.9 * directed(clean.detach(), logits(0.5 * d)))


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize(("norm", "steps"), [("linf", 1), ("linf", 3), ("l2", 2)])
def test_smart(classes: int, norm: str, steps: int) -> None:
    model, batch, logits, mask = problem(classes)
    smart = SMART(
        objective(classes), lam=2.0, mu=0.5, epsilon=0.1, sigma=0.05, eta=0.07, steps=steps, norm=norm, total_steps=10
    )
    smart.prepare(model)
    teacher = head("bert", num_labels=classes).double()
    teacher.load_state_dict(model.state_dict())
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    smart.prepare(model)
    for p, q in zip(no_dropout(teacher).parameters(), model.parameters(), strict=True):
        p.data.copy_(0.99 * p.data + 0.01 * q.data)

    def inside(delta: Tensor) -> Tensor:
        if norm == "linf":
            return delta.clamp(-0.1, 0.1)
        return torch.stack([row * min(1.0, 0.1 / float(row.norm())) for row in delta])

    def length(row: Tensor) -> float:
        return float(row.abs().max() if norm == "linf" else row.norm())

    torch.manual_seed(5)
    found = smart(model, batch)
    torch.manual_seed(5)
    clean = logits()
    delta = inside(torch.empty(4, 6, 16, dtype=torch.float64).normal_(0, 0.05) * mask)
    for _ in range(steps):
        at = delta.clone().requires_grad_()
        (g,) = torch.autograd.grad(distance(clean.detach(), logits(at)).sum(), at)
        g = torch.stack([row / length(row) for row in g * mask])
        delta = inside(delta + 0.07 * g)
    wanted = loss(clean, batch) + 2.0 * distance(clean, logits(delta))
    agree(model, found, wanted + 0.5 * distance(clean, logits(net=teacher).detach()))


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("reduction", ["paper", "released"])
def test_rdrop(classes: int, passes: str, reduction: str) -> None:
    model, batch, _, _ = problem(classes)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    torch.manual_seed(5)
    found = RDrop(objective(classes), alpha=0.6, passes=passes, reduction=reduction)(model, batch)
    torch.manual_seed(5)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    if passes == "one":
        first, second = model(**{k: torch.cat([v, v]) for k, v in inputs.items()}).logits.chunk(2)
    else:
        first, second = model(**inputs).logits, model(**inputs).logits
    assert not torch.allclose(first, second)
    apart = distance(first, second) * (1 if classes == 1 else 0.5)
    both = loss(first, batch) + loss(second, batch)
    wanted = both / 2 + 0.6 * apart
    if reduction == "released":  # the released BERT code sums the divergence over the batch
        wanted = both + 0.6 * apart * (1 if classes == 1 else 4)
        if classes > 1:
            p, q = first.log_softmax(-1), second.log_softmax(-1)
            summed = [nn.functional.kl_div(a, b.exp(), reduction="sum") for a, b in ((p, q), (q, p))]
            released = loss(first, batch).mean() + loss(second, batch).mean() + 0.6 * 0.5 * sum(summed)
            torch.testing.assert_close(found.mean(), released, rtol=1e-9, atol=0)
    agree(model, found, wanted)


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: RDrop(o, alpha=3.0),
        lambda o: RDrop(o, alpha=3.0, passes="two"),
        lambda o: R3F(o, eps=0.0, lam=3.0),
        lambda o: EmbeddingNoise(o, scale=0.0),
        lambda o: VAT(o, epsilon=0.0),
        lambda o: SMART(o, epsilon=0.0, mu=0.0),
    ],
    ids=["rdrop", "rdrop-two", "r3f", "noise", "vat", "smart"],
)
def test_nothing_to_regularise_is_plain_training(classes: int, wrap) -> None:
    model, batch, logits, _ = problem(classes)
    agree(model, wrap(objective(classes))(model, batch), loss(logits(), batch))


def test_rdrop_as_released_sums_over_the_target_tokens() -> None:
    first, second = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 0, 1], [0, -100, -100, -100], [-100, 6, 5, -100]])
    found = RDrop(Tokens(), alpha=0.5, reduction="released").combine((first, second), (None, labels))
    apart = 0.5 * (kl(first, second) + kl(second, first))[labels != -100].sum()
    plain = sum(cross_entropy(x.flatten(0, 1), labels.flatten()) for x in (first, second))
    torch.testing.assert_close(found.mean(), plain + 0.5 * apart, rtol=1e-10, atol=0)


def test_the_divergence_of_stacked_views_is_the_mean_over_the_views() -> None:
    first, second = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    wrapped, batch = RDrop(Classification()), (None, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(wrapped.directed(first, second, batch), kl(first, second).mean(0))
    both = 0.5 * (kl(first, second) + kl(second, first))
    torch.testing.assert_close(wrapped.divergence(first, second, batch), both.mean(0))
