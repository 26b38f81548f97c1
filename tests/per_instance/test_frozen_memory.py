"""A step over frozen weights makes no tensor as large as one of them: no gradient, no copy, no perturbed weight."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasam import ERM, SAM, CausalLM, Method, PerInstanceSAM, select

pytest.importorskip("peft")
N, T, VOCABULARY = 3, 4, 47  # more rows than these 12, and a group of 3 is smaller written out than as factors


def llama() -> nn.Module:
    """Sizes that no activation has."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=26, intermediate_size=34, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).train()


class Sizes(TorchDispatchMode):
    """Notes tensors with memory of their own whose last two dimensions are those of a watched matrix, either way."""

    def __init__(self, model: nn.Module, watched: list[Tensor]) -> None:
        super().__init__()
        self.memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.shapes = {shape for p in watched for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            watched = isinstance(value, Tensor) and not value.is_meta and tuple(value.shape[-2:]) in self.shapes
            if watched and value.untyped_storage().data_ptr() not in self.memory:
                self.found.append(f"{func}: {tuple(value.shape)}")
        return output


def made_by(method: Method, watch: Any) -> list[str]:
    """Of a second step: the first one compares a sample of the gradients with autograd's."""
    model = llama()
    ids = torch.randint(3, VOCABULARY, (N, T))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    method.backward(model, batch, CausalLM())
    watched = [p for name, p in model.named_parameters() if watch(name) and p.ndim == 2 and not p.requires_grad]
    assert watched
    gc.collect()
    with Sizes(model, watched) as sizes:
        method.backward(model, batch, CausalLM())
    assert all(p.grad is None for p in watched)
    return sizes.found


def is_base(name: str) -> bool:
    return "base_layer" in name


@pytest.mark.parametrize("group", [1, 2, N])
def test_the_matrices_under_adapters(group: int) -> None:
    assert made_by(PerInstanceSAM(params="base", group=group), is_base) == []


def test_every_frozen_matrix() -> None:
    """Also the embeddings and the head."""
    assert made_by(PerInstanceSAM(params="all"), lambda name: "lora" not in name) == []


def test_the_test_would_notice() -> None:
    assert made_by(ERM(), is_base) == []
    assert len(made_by(SAM(params="base"), is_base)) >= len(select(llama(), "base"))


def test_the_first_step_compares_a_sample_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that autograd computes for the comparison would be a copy of a large model."""
    from deltasam.per_instance.interception import slots

    monkeypatch.setattr(slots, "_MOST_COMPARED", 100)
    model = llama()
    base = select(model, "base")
    ids = torch.randint(3, VOCABULARY, (N, T))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with Sizes(model, list(base.values())) as sizes:
        PerInstanceSAM(params="base").backward(model, batch, CausalLM())
    gradients = [each for each in sizes.found if "aten.mm" in each]  # autograd's; the engine's are in one bmm each
    assert len(gradients) == 2 * len(base) // 2  # two groups, and one of the two layers


def test_the_peak_of_a_step_is_far_from_another_copy() -> None:
    """The parameters that are differentiated by are not set to require gradients while the model trains."""
    seen: list[bool] = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 9), requires_grad=False)
            self.in_features, self.out_features = 9, 7

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    from helpers.frozen import Adapter

    layer = Adapter(Watch())
    parameter = layer.base_layer.weight
    method, x = PerInstanceSAM(params="base"), torch.randn(4, 9)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        losses = model(x).square().sum(-1)
        if losses.requires_grad:
            losses.register_hook(lambda grad: seen.append(parameter.requires_grad))
        return losses

    method.backward(layer, x, objective)
    seen.clear()
    method.backward(layer, x, objective)
    assert seen[-1] is False  # in the pass that trains
