"""A resumed run ends with the weights of an uninterrupted one: checkpoints hold the state of method and objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from deltasam import methods
from deltasam.integrations import MethodTrainer
from deltasam.integrations._objective import check_objective_weights
from deltasam.integrations._state import load_state, save_state
from deltasam.methods import ERM, SAM, BiLoRA, DeltaSAM, FisherSAM, LookSAM, Method
from deltasam.objectives import Classification
from deltasam.objectives.nesting import innermost
from deltasam.objectives.regularisers import SMART, EmbeddingNoise, RDrop
from helpers.trainers import arguments, assert_same_bits, classification_data, fresh, largest_difference, weights

CASES = [
    (ERM(), 1),
    (SAM(rho=0.1), 1),
    (DeltaSAM(rho=0.1), 2),  # with gradient accumulation
    (LookSAM(rho=0.5, k=3), 1),
    (LookSAM(rho=0.5, k=3), 2),
    (FisherSAM(rho=0.5, keep=0.3, refresh=4), 1),
]

KINDS = [
    kind
    for name in methods.__all__
    if isinstance(kind := getattr(methods, name), type) and issubclass(kind, Method) and kind is not Method
]


def trainer_for(folder: Path, method: Method, objective: Any = None, **options: Any) -> MethodTrainer:
    args = arguments(folder, save_strategy="steps", save_steps=4, max_steps=9, **options)
    return MethodTrainer(
        model=fresh(), args=args, method=method, objective=objective, train_dataset=classification_data()
    )


@pytest.mark.parametrize(("method", "accumulation"), CASES, ids=[f"{type(m).__name__}-{k}" for m, k in CASES])
def test_a_resumed_run_equals_the_uninterrupted_one(method: Method, accumulation: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    whole, resumed = (
        trainer_for(tmp_path, replace(method, state={}), **options) for _ in range(2)
    )  # two, without state
    whole.train()
    output = resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_bits(weights(resumed.model), weights(whole.model))
    assert resumed.method.steps == whole.method.steps == 9 * accumulation
    assert output.metrics["train_forwards"] == whole.forwards


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_every_method_trains_and_resumes(kind: type[Method], options: dict[str, Any], tmp_path: Path) -> None:
    chosen = {"params": "trained"} if kind is BiLoRA else {}  # its default, the base of adapters, is not here
    whole, resumed = (trainer_for(tmp_path, kind(**chosen), **options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_bits(weights(resumed.model), weights(whole.model))


def test_without_its_state_looksam_gives_other_weights(tmp_path: Path) -> None:
    """Shows that the comparison above can fail: without the state the weights differ."""
    whole = trainer_for(tmp_path, LookSAM(rho=0.5, k=3))
    whole.train()
    for file in (tmp_path / "checkpoint-4").glob("method_state*"):
        file.unlink()
    resumed = trainer_for(tmp_path, LookSAM(rho=0.5, k=3))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert largest_difference(weights(whole.model), weights(resumed.model)) > 1e-6


def test_the_state_of_the_objective_is_saved_too(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path, ERM(), SMART(Classification(), total_steps=9))
    whole.train()
    resumed = trainer_for(tmp_path, ERM(), SMART(Classification(), total_steps=9))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_bits(weights(resumed.model), weights(whole.model))


class Tempered(nn.Module):
    """An objective with a trainable temperature and fixed class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]), reduction="none")

    def forward(self, model: Any, batch: Any) -> Tensor:
        logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        rows: Tensor = self.criterion(logits * self.temperature, batch["labels"])
        return rows


def noisy(objective: Any) -> EmbeddingNoise:
    return EmbeddingNoise(objective, scale=0.01)


WRAPPED = pytest.mark.parametrize("wrap", [lambda objective: objective, noisy], ids=["bare", "wrapped"])


@WRAPPED
def test_an_objective_may_be_a_module(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        model, objective = fresh(), Tempered()
        adam = torch.optim.AdamW([*model.parameters(), *objective.parameters()], lr=1e-2)
        MethodTrainer(
            model=model,
            args=arguments(tmp_path, save_strategy="steps", save_steps=4, max_steps=9),
            method=SAM(rho=0.1),
            objective=wrap(objective),
            train_dataset=classification_data(),
            optimizers=(adam, None),
        ).train(resume_from_checkpoint=resume)
        ends.append({**weights(model), **weights(objective)})
    assert abs(float(ends[0]["temperature"]) - 1) > 1e-3
    assert_same_bits(*ends)


@WRAPPED
def test_the_weights_of_an_objective_have_the_gradient_of_one_update(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Trainer itself clears the gradients of the model only."""
    seen = []

    class Noting(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.append(objective.temperature.grad)

    objective = Tempered()
    trainer = trainer_for(tmp_path, SAM(), wrap(objective))
    trainer.optimizer = torch.optim.SGD([*trainer.model.parameters(), *objective.parameters()], lr=1e-2)
    trainer.add_callback(Noting)
    objective.temperature.grad = torch.ones(())
    trainer.train()
    assert seen == [None] * 9


@WRAPPED
def test_the_weights_of_an_objective_in_several_processes_are_refused(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"objective=Tempered .* 2 processes"):
        check_objective_weights(wrap(Tempered()), 2)
    check_objective_weights(Tempered().requires_grad_(False), 2)
    check_objective_weights(Classification(), 2)


def test_the_weights_of_an_objective_in_recorded_steps_are_refused(tmp_path: Path) -> None:
    """A captured step fills the gradients of the model only."""
    with pytest.raises(ValueError, match=r"objective=Tempered .*capture=False"):
        MethodTrainer(fresh(), arguments(tmp_path), method=SAM(), objective=Tempered(), capture=True)
    frozen = Tempered().requires_grad_(False)
    assert MethodTrainer(fresh(), arguments(tmp_path), method=SAM(), objective=frozen, capture=True)


@WRAPPED
def test_a_module_resumes_from_a_checkpoint_of_another_objective(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    trainer_for(tmp_path, SAM()).train()
    trainer_for(tmp_path, SAM(), wrap(Tempered())).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_regularisers_keep_the_state_of_a_module() -> None:
    class Weighed(nn.Module, Classification):  # type: ignore[misc]  # both can be called
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.factor = nn.Parameter(torch.ones(()))

    one, other = RDrop(noisy(Weighed())), RDrop(noisy(Weighed()))
    with torch.no_grad():
        innermost(one).factor.fill_(3.0)
    for state in (one.state_dict(), {}):  # a module has no empty state
        other.load_state_dict(state)
        assert innermost(other).factor.item() == 3


def test_another_method_continues_without_the_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_for(tmp_path, SAM()).train()
    other = trainer_for(tmp_path, LookSAM())
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert other.method.steps == 5
    assert "holds the state of SAM; LookSAM starts without state" in caplog.text


def test_another_number_of_processes_continues_without_the_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_for(tmp_path, LookSAM()).train()
    checkpoint = tmp_path / "checkpoint-4"
    for file in checkpoint.glob("method_state.*"):  # as saved by two processes
        file.rename(checkpoint / f"method_state_0{file.suffix}")
    numbers = checkpoint / "method_state_0.json"
    numbers.write_text(json.dumps(json.loads(numbers.read_text()) | {"processes": 2}))
    one = trainer_for(tmp_path, LookSAM())
    one.train(resume_from_checkpoint=str(checkpoint))
    assert one.method.steps == 5
    assert "2 processes, not 1; LookSAM starts without state" in caplog.text


def test_the_state_of_another_process_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's file is missing, for example because only the first node's folder was kept."""
    trainer_for(tmp_path, LookSAM()).train()
    checkpoint = tmp_path / "checkpoint-4"
    for file in checkpoint.glob("method_state.*"):
        file.rename(checkpoint / f"method_state_0{file.suffix}")
    second = trainer_for(tmp_path, LookSAM())
    monkeypatch.setattr(second, "_state_name", lambda: "method_state_1")
    second.train(resume_from_checkpoint=str(checkpoint))
    assert second.method.steps == 5
    assert "holds the state of no method; LookSAM starts without state" in caplog.text


def test_another_method_that_has_trained_before_continues_without_its_state(tmp_path: Path) -> None:
    trainer_for(tmp_path / "sam", SAM()).train()
    other = trainer_for(tmp_path / "look", LookSAM())
    other.train()
    other.train(resume_from_checkpoint=str(tmp_path / "sam" / "checkpoint-4"))
    assert other.method.steps == 5
    assert other.forwards == 5 + 1  # one of the five steps perturbs


def test_a_restart_with_smaller_batches_resets_the_counts(tmp_path: Path) -> None:
    class Hungry(Classification):
        """Runs out of memory in the third step of large batches."""

        def __call__(self, model: Any, batch: Any) -> torch.Tensor:
            if len(batch["labels"]) > 2 and trainer.state.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().__call__(model, batch)

    trainer = trainer_for(tmp_path, LookSAM(k=3), Hungry(), auto_find_batch_size=True)
    output = trainer.train()
    assert trainer.method.steps == 9
    assert output.metrics["train_forwards"] == 9 + 3


def test_the_arguments_in_a_checkpoint_are_the_users(tmp_path: Path) -> None:
    trainer_for(tmp_path, SAM()).train()
    saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter is True


def test_the_checkpoint_holds_no_pickled_method(tmp_path: Path) -> None:
    trainer_for(tmp_path, LookSAM()).train()
    folder = tmp_path / "checkpoint-4"
    names = {file.name for file in folder.glob("method_state*")}
    assert names == {"method_state.json", "method_state.safetensors"}
    assert json.loads((folder / "method_state.json").read_text())["type"] == "LookSAM"


def test_state_survives_the_disk(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    state = {
        "steps": 3,
        "rate": 0.1,
        "name": "x",
        "none": None,
        "flag": torch.tensor(True),
        "empty": {},
        "again": shared,  # shares memory
        "deep": {"a.b/c": shared, "view": shared.T, "list": [1, torch.ones(2, dtype=torch.bfloat16)]},
    }
    save_state(tmp_path, "state", state)
    found = load_state(tmp_path, "state", torch.device("cpu"))
    assert found is not None
    assert {key: found[key] for key in ("steps", "rate", "name", "none", "empty")} == {
        key: state[key] for key in ("steps", "rate", "name", "none", "empty")
    }
    assert torch.equal(found["flag"], torch.tensor(True))
    assert torch.equal(found["deep"]["a.b/c"], shared)
    assert torch.equal(found["again"], shared)
    assert torch.equal(found["deep"]["view"], shared.T)
    assert found["deep"]["list"][1].dtype == torch.bfloat16
    assert load_state(tmp_path, "other", torch.device("cpu")) is None


def test_state_that_would_need_pickle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set at 'method/seen'"):
        save_state(tmp_path, "state", {"method": {"seen": {1}}})
