"""FreeLB, TAT and TAVAT against loops written out in float64 with ``inputs_embeds``."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam import ERM, TAT, TAVAT, Classification, Contrastive, FreeLB, MicroBatches, RDrop, Regression, Seq2Seq
from deltasam.methods import Method
from deltasam.methods._embedding_ascent import EmbeddingAscent
from helpers.heads import FAMILIES, head, no_dropout, texts
from helpers.problems import grads, relative_error
from helpers.tiny import encoder, sentences, seq2seq, target_tokens

METHODS = [FreeLB, TAT, TAVAT]


def bert(classes: int = 3, dropout: float = 0.0) -> nn.Module:
    model = no_dropout(head("bert", num_labels=classes)).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    for p in model.parameters():
        p.data.mul_(3)
    return model


def perturbed_logits(model: nn.Module, batch: dict[str, Tensor], delta: Tensor) -> Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"])
    return model(inputs_embeds=embedded + delta, attention_mask=batch["attention_mask"]).logits


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits[:, 0] - labels) ** 2 if logits.shape[1] == 1 else cross_entropy(logits, labels, reduction="none")


def noise_of(method: Method, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The initial noise that the method will draw, from a run with one pass."""
    added = []
    layer = model.get_input_embeddings()
    clean = layer(batch["input_ids"])
    probe = method.replace(adv_steps=1)
    object.__setattr__(probe, "state", {})

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        watch = layer.register_forward_hook(lambda m, a, out: added.append(out.detach() - clean.detach()))
        try:
            return (
                Classification()(model, batch) if batch["labels"].dtype == torch.int64 else Regression()(model, batch)
            )
        finally:
            watch.remove()

    probe.backward(model, batch, objective)
    model.zero_grad()
    return added[0]


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize(("norm", "max_norm"), [("l2", 0.5), ("l2", None), ("linf", 0.1)])
def test_freelb_is_the_mean_over_its_steps(classes: int, norm: str, max_norm: float | None) -> None:
    model, batch = bert(classes), texts(classes=classes)
    batch["labels"] = batch["labels"] if classes > 1 else batch["labels"].double()
    method = FreeLB(adv_steps=4, adv_lr=0.3, init_magnitude=0.4, max_norm=max_norm, norm=norm)
    delta = noise_of(method, model, batch)
    mask = batch["attention_mask"].unsqueeze(-1)
    step = method.backward(model, batch, Classification() if classes > 1 else Regression())
    found = grads(model)

    lengths = batch["attention_mask"].sum(1)
    if norm == "l2":  # U(-1, 1) / sqrt(length * hidden), of variance 1/3
        sizes = delta.flatten(1).norm(dim=1)
        torch.testing.assert_close(sizes, torch.full_like(sizes, 0.4 / 3**0.5), rtol=0.25, atol=0)
        assert (delta.abs().amax((1, 2)) <= 0.4 / (lengths * 16) ** 0.5).all()
    else:
        assert delta.abs().max() <= 0.4

    model.zero_grad()
    total: dict[str, Tensor] = {}
    for t in range(4):
        at = delta.clone().requires_grad_()
        losses = losses_of(perturbed_logits(model, batch, at), batch["labels"])
        if t in (0, 3):
            reported = step.losses if t == 0 else step.perturbed_losses
            torch.testing.assert_close(reported, losses.detach(), rtol=1e-10, atol=1e-12)
        losses.mean().backward()
        for name, g in grads(model).items():
            total[name] = total.get(name, 0) + g / 4
        model.zero_grad()
        for i in range(len(delta)):
            g = at.grad[i] * mask[i]
            delta[i] += 0.3 * g / (g.norm() if norm == "l2" else g.abs().max())
            if max_norm is not None and norm == "l2":
                delta[i] *= min(1.0, max_norm / float(delta[i].norm()))
            elif max_norm is not None:
                delta[i].clamp_(-max_norm, max_norm)
    assert relative_error(found, total) < 1e-9
    assert (step.forwards, step.backwards) == (4, 4)


def test_tat_targets_the_class_most_often_confused() -> None:
    model, batch = bert(), texts(n=6, seed=4)
    method = TAT(adv_steps=3, adv_lr=0.3, init_magnitude=0.0, max_norm=0.5)
    mask = batch["attention_mask"].unsqueeze(-1)
    labels = batch["labels"]
    # without counts the target is the likeliest wrong class; afterwards the table decides
    table = torch.tensor([[0.0, 1, 5], [7, 0, 2], [0, 0, 0]])
    for counts in (None, table):
        if counts is not None:
            method.load_state_dict({"steps": 1, "confusion": counts})
        model.zero_grad()
        step = method.backward(model, batch, Classification())
        found = grads(model)
        model.zero_grad()
        with torch.no_grad():
            clean = perturbed_logits(model, batch, torch.zeros(()))
        likeliest = clean.scatter(1, labels.unsqueeze(1), -torch.inf).argmax(1)
        target = likeliest if counts is None else torch.where(labels == 2, likeliest, torch.tensor([2, 0, 9])[labels])
        delta = torch.zeros(6, 6, 16, dtype=torch.float64)
        total: dict[str, Tensor] = {}
        for _ in range(3):
            at = delta.clone().requires_grad_()
            logits = perturbed_logits(model, batch, at)
            (g,) = torch.autograd.grad(cross_entropy(logits, target, reduction="sum"), at, retain_graph=True)
            cross_entropy(logits, labels).backward()
            for name, value in grads(model).items():
                total[name] = total.get(name, 0) + value / 3
            model.zero_grad()
            for i in range(6):
                delta[i] -= 0.3 * (g * mask)[i] / (g * mask)[i].norm()
                delta[i] *= min(1.0, 0.5 / float(delta[i].norm()))
        assert relative_error(found, total) < 1e-9
        assert (step.forwards, step.backwards) == (3, 5)
        wrong = clean.argmax(1) != labels
        mistakes = torch.zeros(3, 3)
        for gold, predicted in zip(labels[wrong], clean.argmax(1)[wrong], strict=True):
            mistakes[gold, predicted] += 1
        wanted = mistakes if counts is None else counts + mistakes
        assert method.state_dict()["confusion"].equal(wanted)
        assert mistakes.sum() > 0


def test_tat_samples_targets_in_proportion_and_never_the_gold_class() -> None:
    from deltasam.methods._tat import _Targets

    method = TAT(target="sampled")
    method.state["confusion"] = torch.tensor([[0.0, 1, 3], [1, 0, 0], [0, 0, 0]])
    labels = torch.tensor([0, 1, 2]).repeat(2000)
    chosen = _Targets(method, Classification())._choose(torch.randn(6000, 3), labels, 0)
    assert (chosen != labels).all()
    assert (chosen[labels == 1] == 0).all()
    assert abs(float((chosen[labels == 0] == 2).float().mean()) - 0.75) < 0.05


@pytest.mark.parametrize("max_norm", [None, 0.4])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_tavat_tokens_carry_their_perturbations(norm: str, max_norm: float | None) -> None:
    model, batch = bert(), texts()
    ids, mask = batch["input_ids"], batch["attention_mask"].unsqueeze(-1)
    ids[mask.squeeze(-1) == 0] = ids[0, 0]  # padding with the id of a token that occurs; it does not count
    order = 2 if norm == "l2" else torch.inf
    method = TAVAT(adv_steps=3, adv_lr=0.3, init_magnitude=0.0, max_norm=max_norm, norm=norm)
    torch.manual_seed(2)
    table = 0.1 * torch.randn(41, 16, dtype=torch.float64)
    method.load_state_dict({"steps": 1, "vocabulary": table})
    step = method.backward(model, batch, Classification())
    found = grads(model)
    model.zero_grad()
    delta, eta = torch.zeros(4, 6, 16, dtype=torch.float64), table[ids] * mask
    total: dict[str, Tensor] = {}
    for t in range(3):
        d, e = delta.clone().requires_grad_(), eta.clone().requires_grad_()
        cross_entropy(perturbed_logits(model, batch, d + e), batch["labels"]).backward()
        for name, value in grads(model).items():
            total[name] = total.get(name, 0) + value / 3
        model.zero_grad()
        if t == 2:
            break
        for i in range(4):
            g = d.grad[i] * mask[i]
            delta[i] += 0.3 * g / g.flatten().norm(order)
            for j in range(6):
                if mask[i, j]:
                    eta[i, j] += 0.3 * e.grad[i, j] / e.grad[i, j].norm(order)
            sizes = eta[i].norm(dim=-1, keepdim=True)
            eta[i] *= sizes / sizes.max()
            if max_norm is not None:
                shrink = min(1.0, max_norm / float((delta[i] + eta[i]).flatten().norm(order)))
                delta[i] *= shrink
                eta[i] *= shrink
    assert relative_error(found, total) < 1e-9
    wanted = table.clone()
    for token in set(ids[mask.squeeze(-1).bool()].tolist()):
        wanted[token] = eta[(ids == token) & mask.squeeze(-1).bool()].mean(0)
    torch.testing.assert_close(method.state_dict()["vocabulary"], wanted, rtol=1e-9, atol=1e-12)
    assert (step.forwards, step.backwards) == (3, 3)


def test_tavat_vocabulary_starts_small_and_is_saved_as_a_copy() -> None:
    model, batch = bert(), texts()
    method = TAVAT(init_magnitude=0.2)
    method.backward(model, batch, Classification())
    saved = method.state_dict()
    untouched = torch.ones(41, dtype=torch.bool).index_fill(0, batch["input_ids"].flatten(), False)
    assert 0 < saved["vocabulary"][untouched].abs().max() <= 0.2 / 16**0.5
    before = saved["vocabulary"].clone()
    method.backward(model, batch, Classification())
    assert saved["vocabulary"].equal(before)
    assert not method.state["vocabulary"].equal(before)
    assert saved["vocabulary"][0].abs().max() <= 0.2 / 16**0.5  # padding has no perturbation


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    "settings", [{"adv_steps": 1}, {"adv_steps": 4, "adv_lr": 0.0}], ids=["one step", "no ascent"]
)
def test_nothing_to_ascend_is_plain_training_bit_for_bit(kind: type, settings: dict) -> None:
    results = []
    for method in (kind(init_magnitude=0.0, **settings), ERM()):
        model, batch = bert(dropout=0.2), texts()
        torch.manual_seed(1)
        step = method.backward(model, batch, Classification())
        results.append(grads(model))
    assert all(torch.equal(g, results[1][n]) for n, g in results[0].items())
    assert (step.forwards, step.backwards) == (1, 1)


@pytest.mark.parametrize("kind", METHODS)
def test_padding_is_never_perturbed_and_the_ball_holds(kind: type) -> None:
    model, batch = bert(), texts()
    clean = model.get_input_embeddings()(batch["input_ids"]).detach()
    seen = []

    def watching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        handle = model.get_input_embeddings().register_forward_hook(
            lambda m, a, out: seen.append(out.detach() - clean)
        )
        try:
            return Classification()(model, batch)
        finally:
            handle.remove()

    method = kind(adv_steps=4, adv_lr=1.0, init_magnitude=0.1, max_norm=0.3)
    for _ in range(3):
        method.backward(model, batch, watching)
    assert len(seen) == 12
    real = batch["attention_mask"].bool()
    for i, added in enumerate(seen):
        assert (added[~real] == 0).all()
        if i % 4 or kind is not TAVAT:  # TAVAT starts from its vocabulary
            assert added.flatten(1).norm(dim=1).max() <= 0.3 * (1 + 1e-9)
        if i % 4:
            torch.testing.assert_close(added.flatten(1).norm(dim=1), torch.full((4,), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0.0])
def test_a_bad_gradient_leaves_the_embeddings_where_they_are(bad: float) -> None:
    model, batch = bert(), texts()
    calls = 0

    def spoilt(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        layer, first = model.get_input_embeddings(), calls == 1

        def spoil(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            # after the method's hook: the gradient of the perturbation is bad in the first pass only
            return Spoil.apply(out, bad) if first else out

        handle = layer.register_forward_hook(spoil)
        try:
            return Classification()(model, batch)
        finally:
            handle.remove()

    method = FreeLB(adv_steps=2, adv_lr=0.5, init_magnitude=0.0)
    step = method.backward(model, batch, spoilt)
    assert bool(step.skipped)
    assert method.skipped == 1
    assert step.perturbed_losses.equal(step.losses)


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@pytest.mark.parametrize("kind", METHODS)
def test_micro_batches_are_one_batch(kind: type) -> None:
    batch = texts(n=7)
    parts = MicroBatches([{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 2), (2, 5), (5, 7))])
    results, steps = [], []
    for what in (batch, parts):
        model = bert()
        method = kind(init_magnitude=0.0, adv_lr=0.3)
        for _ in range(2):  # the second step uses the state of the first
            model.zero_grad()
            steps.append(method.backward(model, what, Classification()))
        results.append((grads(model), method.state_dict()))
    assert relative_error(results[1][0], results[0][0]) < 1e-9
    assert (steps[1].forwards, steps[1].backwards) == (steps[3].forwards, steps[3].backwards)
    for name in ("confusion", "vocabulary"):
        if name in results[0][1]:
            torch.testing.assert_close(results[0][1][name], results[1][1][name])


@pytest.mark.parametrize("kind", METHODS)
def test_other_objectives(kind: type) -> None:
    method = kind(adv_lr=0.5, init_magnitude=0.1)
    batch = {**sentences(), "labels": target_tokens()}
    model = seq2seq("t5")
    step = method.backward(model, batch, Seq2Seq())
    assert (step.perturbed_losses > step.losses).sum() >= 2
    model = bert(1)
    batch = texts(classes=1)
    assert torch.isfinite(method.replace().backward(model, batch, Regression()).perturbed_losses).all()
    model = bert(dropout=0.3)
    step = kind(adv_lr=0.5).backward(model, texts(), RDrop(Classification()))
    assert step.losses.shape == (4,)
    assert grads(model)


def test_only_the_second_view_of_a_contrastive_batch_is_perturbed() -> None:
    model = encoder("bert").double()
    views = (sentences(seed=0), sentences(seed=1))
    seen = []
    model.embeddings.LayerNorm.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach().clone()))
    FreeLB(adv_steps=3, adv_lr=0.5, init_magnitude=0.0).backward(model, views, Contrastive(adversary="second"))
    first, second = seen[0::2], seen[1::2]
    assert len(first) == len(second) == 3
    assert all(x.equal(first[0]) for x in first)
    assert not second[1].equal(second[0])


@pytest.mark.parametrize(("family", "classes"), [*((family, 3) for family in FAMILIES), ("bert", 1)])
def test_all_families_in_bf16_autocast(family: str, classes: int) -> None:
    objective = Classification() if classes > 1 else Regression()
    for kind in METHODS:
        model, batch = head(family, num_labels=classes), texts(classes=classes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step = kind(adv_lr=1.0, adv_steps=2).backward(model, batch, objective)
        assert all(torch.isfinite(g).all() for g in grads(model).values())
        assert torch.isfinite(step.perturbed_losses).all()
        assert not bool(step.skipped)


def test_bad_hyperparameters_are_named() -> None:
    for name, bad in {"adv_steps": 0, "adv_lr": -1.0, "init_magnitude": -0.1, "max_norm": 0.0, "norm": "l1"}.items():
        with pytest.raises(ValueError, match=name):
            FreeLB(**{name: bad})
    with pytest.raises(ValueError, match="target"):
        TAT(target="least")
    with pytest.raises(ValueError, match="decay"):
        TAT(decay=2.0)


@pytest.mark.parametrize("kind", METHODS)
def test_a_step_is_freed_without_the_garbage_collector(kind: type[FreeLB], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[EmbeddingAscent]] = []
    original = EmbeddingAscent.__init__

    def remember(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(EmbeddingAscent, "__init__", remember)
    model, batch = head("bert"), texts()
    gc.disable()
    try:
        kind().backward(model, batch, Classification())
        assert [ref() for ref in made] == [None]  # and its perturbations, which are as large as the embeddings
    finally:
        gc.enable()
