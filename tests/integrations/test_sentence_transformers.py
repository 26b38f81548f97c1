"""A method inside sentence-transformers' trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra sts)")
pytest.importorskip("datasets", reason="datasets is not installed (extra lab)")

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers import losses as st_losses
from sentence_transformers.models import BoW

from deltasam.integrations import SentenceTransformerMethodTrainer
from deltasam.methods import ERM, SAM, DeltaSAM
from deltasam.objectives import Contrastive
from deltasam.objectives.nesting import innermost
from deltasam.objectives.regularisers import EmbeddingNoise
from helpers.trainers import arguments, assert_same_bits, largest_difference, weights

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "big", "small", "mat", "tree"]


class Head(nn.Module):
    """A layer with dropout on a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(len(WORDS), 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = self.layers(features["sentence_embedding"])
        return features

    def save(self, *args: Any, **kwargs: Any) -> None:
        """These tests load nothing."""


def encoder() -> SentenceTransformer:
    torch.manual_seed(3)
    return SentenceTransformer(modules=[BoW(vocab=WORDS), Head()], device="cpu")


def pairs(*, scored: bool = False) -> Dataset:
    random = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (5,), generator=random)) for _ in range(32)]
    columns: dict[str, Any] = {"one": texts[:16], "two": texts[16:]}
    if scored:
        columns["score"] = torch.rand(16, generator=random).tolist()
    return Dataset.from_dict(columns)


def options(folder: Path, **changes: Any) -> Any:
    return arguments(folder, kind=SentenceTransformerTrainingArguments, max_steps=4, **changes)


def test_a_loss_that_returns_rows_trains_as_its_mean_does(tmp_path: Path) -> None:
    results = []
    for reduction in ("mean", "none"):
        model = encoder()
        loss = st_losses.CosineSimilarityLoss(model, loss_fct=nn.MSELoss(reduction=reduction))
        common = {"model": model, "args": options(tmp_path), "train_dataset": pairs(scored=True), "loss": loss}
        if reduction == "mean":
            SentenceTransformerTrainer(**common).train()
        else:
            SentenceTransformerMethodTrainer(**common, method=SAM(rho=0.0)).train()
        results.append(weights(model))
    assert largest_difference(results[0], weights(encoder())) > 1e-3
    assert_same_bits(*results)


def test_contrastive_takes_the_two_columns(tmp_path: Path) -> None:
    changed = []
    for method in (ERM(), DeltaSAM(rho=0.5)):
        model = encoder()
        trainer = SentenceTransformerMethodTrainer(
            model=model,
            args=options(tmp_path, logging_strategy="steps", logging_steps=2),
            train_dataset=pairs(),
            eval_dataset=pairs(),
            method=method,
            objective=Contrastive(temperature=0.05),
        )
        trainer.train()
        changed.append(weights(model))
        assert trainer.evaluate()["eval_loss"] > 0
    assert any("sharpness" in entry for entry in trainer.state.log_history)
    assert largest_difference(*changed) > 1e-4


def test_the_rows_are_those_of_the_embeddings(tmp_path: Path) -> None:
    model = encoder().eval()
    trainer = SentenceTransformerMethodTrainer(
        model=model, args=options(tmp_path), train_dataset=pairs(), method=ERM(), objective=Contrastive()
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    features, _ = trainer.collect_features(inputs)
    views = [model(dict(view))["sentence_embedding"] for view in features]
    expected = Contrastive().losses(torch.stack(views), None)
    torch.testing.assert_close(trainer.objective(model, trainer._objective_batch(inputs)), expected)


def test_a_loss_without_rows_raises(tmp_path: Path) -> None:
    model = encoder()
    trainer = SentenceTransformerMethodTrainer(
        model=model,
        args=options(tmp_path),
        train_dataset=pairs(),
        loss=st_losses.MultipleNegativesRankingLoss(model),
        method=SAM(),
    )
    with pytest.raises(ValueError, match=r"loss=MultipleNegativesRankingLoss .* objective=Contrastive\("):
        trainer.train()


@pytest.mark.parametrize("scored", [False, True])
def test_no_loss_and_no_objective_raises(scored: bool, tmp_path: Path) -> None:
    """The default of sentence-transformers compares pairs with each other, and fails without scores."""
    data = pairs().add_column("score", [0.5] * len(pairs())) if scored else pairs()
    trainer = SentenceTransformerMethodTrainer(
        model=encoder(), args=options(tmp_path), train_dataset=data, method=SAM()
    )
    with pytest.raises(ValueError, match=r"loss=CoSENTLoss, .* objective=Contrastive\("):
        trainer.train()


def test_three_columns_raise(tmp_path: Path) -> None:
    data = pairs().add_column("three", pairs()["one"])
    trainer = SentenceTransformerMethodTrainer(
        model=encoder(), args=options(tmp_path), train_dataset=data, method=SAM(), objective=Contrastive()
    )
    with pytest.raises(ValueError, match="3 text columns"):
        trainer.train()


class Parts(nn.Module):
    """A loss of two parts, each with one row per pair."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two = (self.model(view)["sentence_embedding"] for view in features)
        similarity = torch.cosine_similarity(one, two)
        return {"distance": (similarity - labels) ** 2, "size": 0.1 * similarity**2}


def test_a_loss_of_several_parts_is_evaluated_as_it_is_trained(tmp_path: Path) -> None:
    model = encoder().eval()
    trainer = SentenceTransformerMethodTrainer(
        model=model,
        args=options(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=pairs(scored=True),
        eval_dataset=pairs(scored=True),
        loss=Parts(model),
        method=SAM(),
    )
    inputs = trainer.data_collator(list(pairs(scored=True)))
    expected = float(trainer.objective(model, inputs).detach().mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    trainer.train()
    last = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(last)


def test_a_compiled_model_that_was_evaluated_before(tmp_path: Path) -> None:
    """transformers 4 compiles it twice, once for the evaluation; the loss uses the current one."""
    results = []
    for compiling in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        model = encoder()
        trainer = SentenceTransformerMethodTrainer(
            model=model,
            args=options(tmp_path, eval_strategy="steps", eval_steps=2, **compiling),
            train_dataset=pairs(scored=True),
            eval_dataset=pairs(scored=True),
            loss=Parts(model),
            method=SAM(),
        )
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
        results.append(weights(model))
    assert largest_difference(*results) < 1e-6


def test_an_objective_assigned_afterwards_uses_the_two_columns(tmp_path: Path) -> None:
    ends = []
    for later in (False, True):
        model, objective = encoder(), Contrastive(temperature=0.05)
        common = {"model": model, "args": options(tmp_path), "train_dataset": pairs(), "eval_dataset": pairs()}
        trainer = SentenceTransformerMethodTrainer(**common, method=SAM(), objective=None if later else objective)
        if later:
            trainer.objective = objective
        trainer.train()
        ends.append({**weights(model), "loss": torch.tensor(trainer.evaluate()["eval_loss"])})
    assert_same_bits(*ends)


class Tempered(Contrastive, nn.Module):
    """A contrastive objective with a weight and its own arguments."""

    def __init__(self) -> None:
        super().__init__(temperature=0.05)
        self.factor = nn.Parameter(torch.ones(()))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.factor * super().losses(outputs, batch)


@pytest.mark.parametrize("noisy", [False, True], ids=["alone", "inside a regulariser"])
def test_a_contrastive_objective_keeps_its_weights(noisy: bool, tmp_path: Path) -> None:
    model, own = encoder(), Tempered()
    given = EmbeddingNoise(own) if noisy else own
    sgd = torch.optim.SGD([*model.parameters(), own.factor], lr=1e-2)
    common = {"model": model, "args": options(tmp_path), "train_dataset": pairs(), "optimizers": (sgd, None)}
    trainer = SentenceTransformerMethodTrainer(**common, method=SAM(), objective=given)
    assert innermost(trainer.objective).factor is own.factor
    assert own.predict is None, "the objective that was given is left alone"
    if not noisy:  # a bag of words has no embeddings
        trainer.train()
        assert own.factor.item() != 1
