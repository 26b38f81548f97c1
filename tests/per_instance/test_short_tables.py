"""Tables with no more rows than lookups: relative positions have T x T of them, and no step compares all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasam import PerInstanceSAM
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


SIZES: dict[str, dict[str, int]] = {
    "MPNet": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "T5": {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32},
}


@pytest.mark.parametrize(("kind", "encoder"), [("MPNet", "MPNetModel"), ("T5", "T5EncoderModel")])
def test_no_tensor_grows_with_the_fourth_power_of_the_length(kind: str, encoder: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=97, **SIZES[kind])
    model, method = getattr(transformers, encoder)(config).train(), PerInstanceSAM(rho=0.05, engine="low-rank")

    def losses(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.pow(3).mean((1, 2))

    ids = torch.randint(3, 97, (N, T))
    method.backward(model, ids, losses)  # the first step compares with the loop
    with Largest() as largest:
        method.backward(model, ids, losses)
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
