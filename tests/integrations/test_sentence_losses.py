"""Which loss and which model sentence-transformers' trainer uses with a method: several losses, wrappers, columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra sts)")
pytest.importorskip("datasets", reason="datasets is not installed (extra lab)")

from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.models import BoW

from deltasam.integrations import SentenceTransformerMethodTrainer
from deltasam.methods import ERM, SAM
from deltasam.objectives import Contrastive
from helpers.trainers import arguments, assert_same_bits, weights

WORDS = ["the", "cat", "dog", "sat", "ran", "on"]


class Head(nn.Module):
    """A trainable layer on a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(len(WORDS), 4)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = self.layer(features["sentence_embedding"])
        return features

    def save(self, *args: Any, **kwargs: Any) -> None:
        """These tests load nothing."""


class Distance(nn.Module):
    """A power of the difference between similarity and score, as rows or their mean, in two parts."""

    def __init__(self, model: nn.Module, power: int, *, rows: bool = True) -> None:
        super().__init__()
        self.model, self.power, self.rows = model, power, rows

    def forward(self, features: Any, labels: Tensor) -> dict[str, Tensor]:
        one, two = (self.model(view)["sentence_embedding"] for view in features)
        distance = (torch.cosine_similarity(one, two) - labels).abs() ** self.power
        parts = {"most": 0.75 * distance, "rest": 0.25 * distance}
        return parts if self.rows else {name: part.mean() for name, part in parts.items()}


class Around(nn.Module):
    """A loss that wraps another one."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *inputs: Any) -> Any:
        return self.loss(*inputs)


class Wrapped(nn.Module):
    """A wrapper like that of data parallelism; counts its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.module(*inputs)


@dataclass(frozen=True)
class Twice:
    """Has the form of a regulariser; doubles the losses."""

    objective: Any

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = 2 * self.objective(model, batch)
        return losses


def encoder() -> SentenceTransformer:
    torch.manual_seed(3)
    return SentenceTransformer(modules=[BoW(vocab=WORDS), Head()], device="cpu")


def pairs(n: int = 12, *, scored: bool = True) -> Dataset:
    random = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (4,), generator=random)) for _ in range(2 * n)]
    columns: dict[str, Any] = {"one": texts[:n], "two": texts[n:]}
    return Dataset.from_dict(columns | ({"score": torch.rand(n, generator=random).tolist()} if scored else {}))


def trainer_of(folder: Path, model: Any, **options: Any) -> SentenceTransformerMethodTrainer:
    args = arguments(folder, kind=SentenceTransformerTrainingArguments, max_steps=4)
    return SentenceTransformerMethodTrainer(model=model, args=args, **options)


def test_every_data_set_has_its_own_loss(tmp_path: Path) -> None:
    data = DatasetDict({"square": pairs(), "plain": pairs(6)})
    ends = []
    for rows in (True, False):
        model = encoder()
        losses = {"square": Distance(model, 2, rows=rows), "plain": Distance(model, 1, rows=rows)}
        if rows:
            trainer_of(tmp_path, model, train_dataset=data, loss=losses, method=SAM(rho=0.0)).train()
        else:
            args = arguments(tmp_path, kind=SentenceTransformerTrainingArguments, max_steps=4)
            SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=losses).train()
        ends.append(weights(model))
    assert_same_bits(*ends)


@pytest.mark.parametrize("nested", [False, True], ids=["loss", "loss in a loss"])
def test_the_loss_uses_the_model_of_the_pass(nested: bool, tmp_path: Path) -> None:
    """The DDP module in the pass that fills ``.grad``, the inner module in the others, also after another wrapper."""
    model = encoder()
    loss = Distance(model, 2)
    trainer = trainer_of(tmp_path, model, train_dataset=pairs(), loss=Around(loss) if nested else loss, method=ERM())
    inputs = trainer.data_collator(list(pairs(4)))
    rows = trainer.objective(model, inputs)
    wrapped, other = Wrapped(model), Wrapped(model)
    torch.testing.assert_close(trainer.objective(wrapped, inputs), rows)
    assert wrapped.calls == 2
    trainer.model_wrapped = wrapped
    torch.testing.assert_close(trainer.objective(model, inputs), rows)
    assert wrapped.calls == 2
    loss.model = other
    torch.testing.assert_close(trainer.objective(model, inputs), rows)
    assert other.calls == 0


def test_the_parts_of_a_loss_are_added(tmp_path: Path) -> None:
    model = encoder()
    trainer = trainer_of(tmp_path, model, train_dataset=pairs(), loss=Distance(model, 1), method=ERM())
    inputs = trainer.data_collator(list(pairs(4)))
    features, labels = trainer.collect_features(inputs)
    one, two = (model(dict(view))["sentence_embedding"] for view in features)
    wanted = (torch.cosine_similarity(one, two) - labels).abs()
    torch.testing.assert_close(trainer.objective(model, inputs), wanted)


def test_the_evaluation_ignores_regularisers(tmp_path: Path) -> None:
    model = encoder()
    trainer = trainer_of(
        tmp_path, model, train_dataset=pairs(scored=False), method=SAM(), objective=Twice(Twice(Contrastive()))
    )
    inputs = trainer.data_collator(list(pairs(4, scored=False)))
    trained = trainer.objective(model, trainer._objective_batch(inputs)).mean()
    torch.testing.assert_close(4 * trainer.compute_loss(model, inputs), trained)


def test_the_columns_are_the_views_in_their_order(tmp_path: Path) -> None:
    """The second view is perturbed."""
    trainer = trainer_of(tmp_path, encoder(), train_dataset=pairs(scored=False), method=SAM(), objective=Contrastive())
    inputs = trainer.data_collator(list(pairs(4, scored=False)))
    views = trainer._objective_batch(inputs)
    for name, column in (("first", "one"), ("second", "two")):
        wanted = {key.removeprefix(f"{column}_"): value for key, value in inputs.items() if key.startswith(column)}
        assert views[name].keys() & wanted.keys()
        for key in views[name].keys() & wanted.keys():
            torch.testing.assert_close(views[name][key], wanted[key])


def test_the_users_predict_is_kept(tmp_path: Path) -> None:
    def predict(model: Any, view: Any) -> Tensor:
        embeddings: Tensor = model(dict(view))["sentence_embedding"]
        return -embeddings

    objective = Contrastive(predict=predict)
    trainer = trainer_of(
        tmp_path, encoder(), train_dataset=pairs(scored=False), method=SAM(), objective=Twice(objective)
    )
    assert trainer.objective.objective.predict is predict
