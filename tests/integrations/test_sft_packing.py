"""Packs of documents: an instance is a document, whichever way it goes through the model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

pytest.importorskip("trl", reason="needs a newer transformers than the oldest one")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from deltasam import ERM, ESAM, SAM, TAVAT, CausalLM, DeltaSAM, Method, PackedCausalLM, PerInstanceSAM, RDrop
from deltasam.integrations import MethodTrainer, SFTMethodTrainer
from deltasam.objectives.packing import LENGTHS, unpacked
from helpers.preferences import llama, lora, tokenizer
from helpers.trainers import arguments, largest_difference, weights

PADDING_FREE: dict[str, Any] = {"padding_free": True, "max_length": None}
PACKED: dict[str, Any] = {"packing": True, "max_length": 24}

pytestmark = pytest.mark.filterwarnings("ignore:.*(label_smoothing_factor|lr_scheduler.step).*")


def rows(n: int = 24) -> Dataset:
    ends = ["d", "e", "f", "g", "h"]
    return Dataset.from_list([
        {"prompt": "a b" + " c" * (i % 3), "completion": " " + " ".join(ends[i % 5 :] * (1 + i % 2))}
        for i in range(n)
    ])  # fmt: skip


def sft(folder: Path, method: Method | None, *, model: Any = None, **options: Any) -> Any:
    defaults = {"kind": SFTConfig, "bf16": False, "gradient_checkpointing": False, "optim": "sgd",
                "max_grad_norm": 0.0, "logging_strategy": "steps", "logging_steps": 1}  # fmt: skip
    more = {name: options.pop(name) for name in ("objective", "capture", "on_out_of_memory") if name in options}
    given = {"model": model or llama(), "args": arguments(folder, **(defaults | options)), "train_dataset": rows(),
             "eval_dataset": rows(8), "processing_class": tokenizer()}  # fmt: skip
    return SFTTrainer(**given) if method is None else SFTMethodTrainer(**given, method=method, **more)


def by_hand(model: Any, batch: Any) -> Tensor:
    """Losses of the documents, one after the other: the sum over their targets, times D / all targets."""
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    starts = [*(batch["position_ids"].flatten() == 0).nonzero().flatten().tolist(), len(ids)]
    sums, targets = [], 0
    for a, b in pairwise(starts):
        if b - a > 1:
            logits = model(input_ids=ids[None, a:b]).logits[0, :-1]
            sums.append(torch.nn.functional.cross_entropy(logits, labels[a + 1 : b], reduction="sum"))
            targets += int((labels[a + 1 : b] != -100).sum())
    return torch.stack(sums) * len(sums) / targets


@pytest.mark.parametrize("options", [PADDING_FREE, PACKED, PACKED | {"pad_to_multiple_of": 16}], ids=str)
def test_the_losses_of_the_documents(options: dict[str, Any], tmp_path: Path) -> None:
    model = llama().double().eval()
    packed = sft(tmp_path, SAM(), model=model, **options)
    batch = next(iter(packed.get_train_dataloader()))
    assert len(batch["input_ids"]) == 1
    expected = by_hand(model, batch)
    assert len(expected) == len(batch[LENGTHS]) > 3
    found = packed.objective(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)  # Llama's norms compute in float32
    without = {name: value for name, value in batch.items() if name != LENGTHS}
    torch.testing.assert_close(packed.objective(model, without), found, msg="the number from the positions")
    torch.testing.assert_close(CausalLM()(model, unpacked(without)), found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [PADDING_FREE, PACKED | {"gradient_accumulation_steps": 2}], ids=str)
def test_without_a_perturbation_it_is_the_plain_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Also what is logged; PerInstanceSAM gets rows, the others the pack."""
    plain = sft(tmp_path, None, **options)
    plain.train()
    names = ("entropy", "mean_token_accuracy", "num_tokens", "loss")
    for method in (ERM(), SAM(rho=0.0), PerInstanceSAM(rho=0.0)):
        ours = sft(tmp_path, method, **options)
        ours.train()
        assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-6
        entries = [[entry for entry in each.state.log_history if "loss" in entry] for each in (plain, ours)]
        for theirs, own in zip(*entries, strict=True):
            assert {name: own[name] for name in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-3)
    moved = sft(tmp_path, SAM(rho=0.1), **options)
    moved.train()
    assert largest_difference(weights(plain.model), weights(moved.model)) > 1e-5


@pytest.mark.parametrize("method", [SAM(rho=0.1), DeltaSAM(rho=0.1)], ids=lambda method: type(method).__name__)
def test_pack_and_rows_are_the_same_step(method: Method, tmp_path: Path) -> None:
    """The pack as it is, and the same documents as rows."""
    model = llama().double()
    batch = next(iter(sft(tmp_path, method, model=model, **PACKED).get_train_dataloader()))
    found = []
    for each in (batch, unpacked(batch)):
        model.zero_grad()
        step = method.replace(state={}).backward(model, each, PackedCausalLM())  # the same random probe
        found.append((step.losses, step.perturbed_losses, step.weights, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "options", "is_packed"),
    [
        (SAM(), {}, True),
        (DeltaSAM(), {}, True),
        (PerInstanceSAM(), {}, False),
        (ESAM(), {}, False),
        (TAVAT(), {}, False),
        (SAM(), {"objective": RDrop(CausalLM())}, False),
        (SAM(), {"objective": CausalLM()}, False),
        (SAM(), {"objective": PackedCausalLM()}, True),
        (SAM(), {"on_out_of_memory": "split"}, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else str(value)[:40],
)
def test_rows_where_instances_must_be_rows(
    method: Method, options: dict[str, Any], is_packed: bool, tmp_path: Path
) -> None:
    trainer = sft(tmp_path, method, **PACKED, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert ("position_ids" in batch) is is_packed
    assert (len(batch["input_ids"]) == 1) is is_packed


def test_per_instance_in_low_rank_equals_the_loop(tmp_path: Path) -> None:
    results = []
    for engine in ("low-rank", "loop"):
        trainer = sft(tmp_path, PerInstanceSAM(rho=0.1, engine=engine), model=lora().double(), max_steps=2, **PACKED)
        trainer.train()
        results.append({name: p for name, p in weights(trainer.model).items() if "lora" in name})
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


def test_a_callback_replaces_the_method(tmp_path: Path) -> None:
    """The data loader still makes packs; the batch is cut into rows in the step."""
    trainer = sft(tmp_path, SAM(rho=0.1), model=lora(), max_steps=2, **PACKED)

    class Switch(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.method = PerInstanceSAM(rho=0.1, engine="low-rank")

    trainer.add_callback(Switch())
    trainer.train()
    assert "sharpness" in trainer.state.log_history[1]


def test_the_plain_trainer_with_a_flattening_collator(tmp_path: Path) -> None:
    data = [{"input_ids": [3 + (i + k) % 8 for k in range(3 + i % 4)]} for i in range(8)]
    collator = hf.DataCollatorWithFlattening()
    args = arguments(tmp_path, max_steps=2, remove_unused_columns=False)
    common: dict[str, Any] = {"args": args, "train_dataset": data, "data_collator": collator}
    trainer = MethodTrainer(model=llama(), **common, method=DeltaSAM(), objective=PackedCausalLM())
    trainer.train()
    plain = hf.Trainer(model=llama(), **common)
    plain.train()
    ours = MethodTrainer(model=llama(), **common, method=ERM(), objective=PackedCausalLM())
    ours.train()
    assert largest_difference(weights(plain.model), weights(ours.model)) < 1e-5
