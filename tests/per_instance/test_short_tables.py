"""A table with fewer rows than it is looked up: relative positions have T x T lookups, of which no matrix is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasam import Classification, PerInstanceSAM
from deltasam.per_instance import record
from deltasam.per_instance.algebra.factors import Rows
from deltasam.step.float32 import float32_kept
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import gradient_errors, loop, relative

N, T = 2, 24


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = (value.numel() for value in tree_leaves(output) if isinstance(value, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return output


def model_of(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "MPNet":
        config = transformers.MPNetConfig(
            vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=64,
        )  # fmt: skip
        return transformers.MPNetForSequenceClassification(config).train()
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_labels=2, pad_token_id=0
    )
    return transformers.T5ForTokenClassification(config).train()


def losses_of(kind: str) -> Any:
    if kind == "MPNet":
        return Classification()

    def per_text(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits.square().mean((1, 2))

    return per_text


@pytest.mark.parametrize("kind", ["MPNet", "T5"])
def test_no_tensor_grows_with_the_fourth_power_of_the_length(kind: str) -> None:
    model, losses = model_of(kind), losses_of(kind)
    ids = torch.randint(3, 97, (N, T))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "MPNet":
        batch["labels"] = torch.arange(N) % 2
    method = PerInstanceSAM(rho=0.05, engine="low-rank")
    method.backward(model, batch, losses)  # the first step compares with the loop
    with Largest() as largest:
        method.backward(model, batch, losses)
    assert largest.elements < N * T**4 / 4


@pytest.mark.parametrize("name", ["GPT-2", "BERT, masked-LM head (tied)", "BERT", "T5"])
def test_a_group_with_more_lookups_than_the_table_has_rows(name: str) -> None:
    """Groups of six texts of six tokens, and 31 rows; in two of the models the table is the head as well."""
    architecture = BY_NAME[name]
    model, run, batch = make(architecture, 12)
    found = record(model, run, group=6).gradients.factors
    assert not any(isinstance(f, Rows) and f.rows <= f.ids.shape[1] for factors in found.values() for f in factors)
    exact = loop(model, run, 0.1, 6)

    def seeded(model: nn.Module, batch: Any) -> Tensor:
        torch.manual_seed(1)  # as make() does in every pass
        return architecture.losses(model, batch)

    step = PerInstanceSAM(rho=0.1, group=6, engine="low-rank").backward(model, batch, seeded)
    assert relative(step.perturbed_losses, exact.perturbed) <= architecture.tolerance
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradient_errors(gradients, exact.gradient) <= architecture.tolerance


@pytest.mark.gpu
def test_sums_on_a_gpu_are_those_of_the_cpu_and_always_the_same() -> None:
    torch.manual_seed(0)
    ids, d = torch.randint(7, (3, 50)), torch.randn(3, 50, 5)
    exact = Rows(ids, d.double(), 7).dense()
    with float32_kept():
        torch.set_float32_matmul_precision("highest")
        found, again = (Rows(ids.cuda(), d.cuda(), 7).dense() for _ in range(2))
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, again)
