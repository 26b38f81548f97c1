"""Regularisers in methods, nested, with every objective and every family of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import (
    ERM,
    R3F,
    SAM,
    SMART,
    VAT,
    CausalLM,
    Classification,
    Contrastive,
    DeltaSAM,
    EmbeddingNoise,
    MicroBatches,
    Objective,
    PerInstanceSAM,
    RDrop,
    Regression,
    Seq2Seq,
)
from deltasam.objectives.regularisers import Site
from helpers.heads import FAMILIES, head, no_dropout, texts
from helpers.problems import grads, relative_error
from helpers.tiny import causal, encoder, sentences, seq2seq, target_tokens

WRAPPERS: dict[str, Callable[[Objective], Objective]] = {
    "rdrop": RDrop,
    "rdrop-two": lambda o: RDrop(o, passes="two"),
    "rdrop-released": lambda o: RDrop(o, alpha=0.5, reduction="released"),
    "r3f": lambda o: R3F(o, eps=0.1),
    "r3f-normal": lambda o: R3F(o, eps=0.1, noise="normal", masks="shared"),
    "noise": EmbeddingNoise,
    "smart": lambda o: SMART(o, epsilon=0.1, sigma=0.1, eta=0.1, total_steps=10),
    "vat": VAT,
}
wrappers = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@pytest.mark.parametrize(("family", "classes"), [*((family, 3) for family in FAMILIES), ("bert", 1)])
def test_all_families_in_bf16_autocast(family: str, classes: int) -> None:
    inner = Classification() if classes > 1 else Regression()
    for wrap in WRAPPERS.values():
        model, batch = head(family, num_labels=classes), texts(classes=classes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step = ERM().backward(model, batch, wrap(inner))
        assert step.losses.shape == (4,)
        assert step.losses.dtype == torch.float32
        assert torch.isfinite(step.losses).all()
        assert all(torch.isfinite(g).all() for g in grads(model).values())


@wrappers
@pytest.mark.parametrize("kind", ["t5", "bart", "gpt2"])
def test_sequence_objectives(wrap: Callable[[Objective], Objective], kind: str) -> None:
    if kind == "gpt2":
        model, inner = causal(kind), CausalLM()
        batch: dict[str, Tensor] = {**sentences(), "labels": target_tokens(length=7)}
    else:
        model, inner = seq2seq(kind), Seq2Seq(label_smoothing=0.1)
        batch = {**sentences(), "labels": target_tokens()}
    objective = wrap(inner)
    step = SAM().backward(model.train(), batch, objective)
    assert step.losses.shape == (4,)
    assert objective.items(batch) == inner.items(batch)
    assert grads(model)


@wrappers
def test_contrastive(wrap: Callable[[Objective], Objective]) -> None:
    model, views = encoder("bert").train(), (sentences(seed=0), sentences(seed=1))
    objective = wrap(Contrastive())
    assert objective.separable is False
    if isinstance(objective, RDrop) and objective.passes == "one":
        with pytest.raises(ValueError, match="passes='two'"):
            objective(model, views)
        return
    assert ERM().backward(model, views, objective).losses.shape == (4,)


@wrappers
@pytest.mark.parametrize("method", [SAM(rho=1e-30), DeltaSAM(rho=1e-30)], ids=["sam", "delta-sam"])
def test_all_passes_of_a_method_see_the_same_noise(wrap: Callable[[Objective], Objective], method: Any) -> None:
    """At a radius below rounding all passes have equal losses, with dropout and noise."""
    results = []
    for each in (ERM(), method):
        model, batch = head("bert").double(), texts()
        torch.manual_seed(1)
        step = each.backward(model, batch, wrap(Classification()))
        results.append((grads(model), torch.rand(2)))
    assert relative_error(results[1][0], results[0][0]) < 1e-12
    assert step.perturbed_losses.equal(step.losses)
    assert results[0][1].equal(results[1][1])  # the same number of random draws


@wrappers
def test_nested_regularisers(wrap: Callable[[Objective], Objective]) -> None:
    """The loss of nested wrappers is computed from their outputs, the stacked views."""
    for other in (EmbeddingNoise, RDrop, lambda o: R3F(o, eps=0.1)):
        model, batch = head("bert").double(), texts()
        nested = wrap(other(Classification()))
        nested.prepare(model)
        torch.manual_seed(1)
        losses = nested(model, batch)
        torch.manual_seed(1)
        outputs = nested.forward(model, batch)
        torch.testing.assert_close(nested.losses(outputs, batch), losses)
        assert losses.shape == (4,)
        zero = torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(nested.divergence(outputs, outputs, batch), zero)
        torch.testing.assert_close(nested.directed(outputs, outputs, batch), zero)
        assert not nested.directed(outputs, outputs.flip(-1), batch).allclose(zero)


def test_rdrop_over_noise_is_the_formula_over_noisy_outputs() -> None:
    model, batch = no_dropout(head("bert")).double(), texts()
    noisy = EmbeddingNoise(Classification(), scale=0.3)
    torch.manual_seed(1)
    found = RDrop(noisy, alpha=2.0, passes="two")(model, batch)
    torch.manual_seed(1)
    first, second = noisy.forward(model, batch), noisy.forward(model, batch)
    plain = Classification()
    wanted = 0.5 * (plain.losses(first, batch) + plain.losses(second, batch)) + 2.0 * plain.divergence(
        first, second, batch
    )
    torch.testing.assert_close(found, wanted)
    assert not first.allclose(second)


@pytest.mark.parametrize("name", ["rdrop", "r3f", "smart", "vat"])
def test_micro_batches_are_one_batch(name: str) -> None:
    """Without noise and dropout, the mean over the micro-batches is the mean over the batch."""
    wrap = {
        "rdrop": RDrop,
        "r3f": lambda o: R3F(o, eps=0.0),
        "smart": lambda o: SMART(o, mu=0.0, sigma=0.0),
        "vat": lambda o: VAT(o, epsilon=0.0),
    }[name]
    batch = {**sentences(6), "labels": target_tokens(6)}
    parts = MicroBatches([{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 1), (1, 4), (4, 6))])
    results = []
    for what in (batch, parts):
        torch.manual_seed(1)
        model = no_dropout(seq2seq("t5")).double()
        step = SAM().backward(model, what, wrap(Seq2Seq()))
        results.append((grads(model), step.losses))
    assert relative_error(results[1][0], results[0][0]) < 1e-9
    torch.testing.assert_close(results[1][1], results[0][1])


def by_token(site: Site, scale: float, *_: Any) -> Tensor:
    """Noise that depends on the tokens alone: an instance has the same noise in its batch and alone."""
    place = torch.arange(site.shape[1]).unsqueeze(-1) * 0.9 + torch.arange(site.shape[2]) * 2.3
    return site.unpadded(scale * (site.ids.unsqueeze(-1) * 1.7 + place).sin().to(site.dtype))


@wrappers
def test_exact_per_instance_perturbation(wrap: Callable[[Objective], Objective], monkeypatch: Any) -> None:
    """The low-rank engine supports hooks, doubled batches, teachers and ascents inside the objective."""
    for module in ("vat", "smart", "r3f", "embedding_noise"):
        monkeypatch.setattr(f"deltasam.objectives.regularisers._{module}.draw", by_token)
    objective = wrap(Classification())
    if not objective.separable:
        return
    results = []
    for engine in ("low-rank", "loop"):
        model = no_dropout(head("bert")).double()
        step = PerInstanceSAM(rho=0.05, engine=engine).backward(model, texts(), wrap(Classification()))
        results.append((grads(model), step.perturbed_losses))
    assert relative_error(results[0][0], results[1][0]) < 1e-9
    torch.testing.assert_close(results[0][1], results[1][1])


def test_any_callable_can_be_noisy() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 1))
    noisy = EmbeddingNoise(lambda model, x: model(x).squeeze(-1).square(), scale=0.5, embeddings="0")
    ids = torch.randint(9, (5, 2))
    assert SAM().backward(model, ids, noisy).losses.shape == (5,)
    with pytest.raises(TypeError, match="compared"):
        RDrop(noisy)(model, ids)


class Counting:
    """A callable with what the methods look for in an objective."""

    separable = False
    mixing = "adds them up"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).squeeze(-1).square()

    def items(self, ids: Tensor) -> Tensor:
        return (ids > 0).sum()

    def prepare(self, model: nn.Module) -> None:
        self.calls.append("prepare")

    def check_parts(self, batches: Any) -> None:
        self.calls.append("check_parts")


def test_what_a_callable_says_about_itself_is_kept() -> None:
    ids = torch.tensor([[1, 2], [3, 0], [0, 0]])
    own = Counting()
    noisy = EmbeddingNoise(own, scale=0.5, embeddings="0")
    assert noisy.items(ids) == 3
    assert (noisy.separable, noisy.mixing) == (False, "adds them up")
    found = []
    for objective in (own, EmbeddingNoise(own, scale=0.0, embeddings="0")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 1))
        ERM().backward(model, MicroBatches([ids[:1], ids[1:]]), objective)
        found.append(grads(model))
    assert relative_error(found[1], found[0]) == 0
    assert own.calls == ["prepare", "check_parts"] * 2


def test_the_state_of_nested_regularisers() -> None:
    model, batch = head("bert"), texts()
    nested = RDrop(SMART(Classification(), total_steps=9), passes="two")
    ERM().backward(model, batch, nested)
    ERM().backward(model, batch, nested)
    state = nested.state_dict()
    assert state["objective"]["updates"] == 1
    other = RDrop(SMART(Classification(), total_steps=9), passes="two")
    other.load_state_dict(state)
    assert other.state_dict()["objective"]["updates"] == 1
    assert RDrop(Classification()).state_dict() == {}
    RDrop(Classification()).load_state_dict({})


def test_separable_is_that_of_the_wrapped_objective() -> None:
    assert RDrop(Classification()).separable
    assert not RDrop(Classification(), reduction="released").separable
    assert "reduction='released'" in RDrop(Classification(), reduction="released").mixing
    assert RDrop(Contrastive(), reduction="released").mixing == Contrastive.mixing
    for name, bad in {"alpha": -1.0, "passes": "three", "reduction": "sum"}.items():
        with pytest.raises(ValueError, match=name):
            RDrop(Classification(), **{name: bad})
    for name, bad in {"eps": float("nan"), "lam": -1.0, "noise": "pink", "masks": "no", "side": "left"}.items():
        with pytest.raises(ValueError, match=name):
            R3F(Classification(), **{name: bad})
    for name, bad in {"xi": 0.0, "steps": 0, "epsilon": -1.0}.items():
        with pytest.raises(ValueError, match=name):
            VAT(Classification(), **{name: bad})
    with pytest.raises(ValueError, match="scale"):
        EmbeddingNoise(Classification(), scale=-0.1)
