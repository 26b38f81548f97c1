"""Batches without the labels that an inferred objective needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets", reason="datasets is not installed (extra lab)")

from datasets import Dataset

from deltasam.integrations import MethodTrainer
from deltasam.methods import SAM
from deltasam.objectives import Classification
from helpers.tiny import causal, classifier
from helpers.trainers import arguments


def rows(column: str) -> list[dict[str, Any]]:
    return [{"input_ids": torch.tensor([5, 6, 7]), column: torch.tensor(i % 2)} for i in range(4)]


def trainer(folder: Path, data: Any, model: Any = None, *, objective: Any = None, **options: Any) -> MethodTrainer:
    args = arguments(folder, **options)
    model = classifier(num_labels=2) if model is None else model
    return MethodTrainer(model=model, args=args, train_dataset=data, method=SAM(), objective=objective)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["classes", "words"])
def test_a_column_of_another_name(kind: str, smoothing: float, tmp_path: Path) -> None:
    model = causal("gpt2") if kind == "words" else classifier(num_labels=2)
    data = Dataset.from_list([{"input_ids": [5, 6, 7], "target": i % 2} for i in range(4)])
    with pytest.raises(ValueError, match=r"'labels', only \['input_ids'.*\['input_ids', 'target'\]") as caught:
        trainer(tmp_path, data, model, label_smoothing_factor=smoothing).train()
    message = str(caught.value)
    assert "rename_column(NAME, 'labels')" in message
    assert "TrainingArguments(label_names=[NAME])" in message
    assert ("DataCollatorForLanguageModeling" in message) == (kind == "words")


def test_a_list_of_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'labels', only \['input_ids'\]"):
        trainer(tmp_path, rows("target")).train()


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'target', only "):
        trainer(tmp_path, rows("labels"), label_names=["target"]).train()


def test_data_that_follow_the_advice(tmp_path: Path) -> None:
    trainer(tmp_path / "a", rows("labels")).train()
    trainer(tmp_path / "b", rows("label")).train()  # the collator's other name
    trainer(tmp_path / "c", rows("target"), label_names=["target"], remove_unused_columns=True).train()


def test_the_users_objective_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Classification\(labels=\.\.\.\)"):
        trainer(tmp_path / "a", rows("target"), objective=Classification()).train()
    assigned = trainer(tmp_path / "b", rows("target"), remove_unused_columns=False)
    assigned.objective = Classification(labels="target")
    assigned.train()
