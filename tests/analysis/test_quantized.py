"""Rounded weights against a loop over the groups; every weight is restored bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import quantized, rounded
from helpers.quantized import Net, PackedLinear
from helpers.tiny import causal


def obvious(weight: Tensor, bits: int, group: int) -> Tensor:
    """Rounds a matrix (outputs, inputs) group by group, in float64."""
    found = weight.double().clone()
    for row in found:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            low, high = float(part.min()), float(part.max())
            values = [low + k * (high - low) / (2**bits - 1) for k in range(2**bits)]
            for i, w in enumerate(part.tolist()):
                part[i] = min(values, key=lambda value, w=w: abs(value - w))
    return found


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("inputs", "group"), [(64, 64), (48, 16), (50, 16), (5, 64)])
def test_against_a_loop(bits: int, inputs: int, group: int) -> None:
    weight = torch.randn(3, inputs, dtype=torch.float64)
    assert torch.allclose(rounded(weight, bits, group=group), obvious(weight, bits, group), atol=1e-12)
    across = rounded(weight.T.contiguous(), bits, group=group, dim=0)
    assert torch.allclose(across.T, obvious(weight, bits, group), atol=1e-12)


def test_rounding_again_changes_nothing_and_constant_groups_stay() -> None:
    once = rounded(torch.randn(4, 64), 4)
    assert torch.allclose(rounded(once, 4), once, atol=1e-6)
    constant = torch.full((2, 64), 0.3)
    assert torch.equal(rounded(constant, 4), constant)
    assert torch.equal(rounded(torch.tensor(0.3), 4), torch.tensor(0.3))
    assert rounded(torch.randn(2, 64, dtype=torch.bfloat16), 4).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_matrices_of_the_layers_and_nothing_else(kind: str) -> None:
    model = causal(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with quantized(model, 3, group=8) as same:
        assert same is model
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        for name in changed:
            weight = before[name].T if kind == "gpt2" else before[name]  # Conv1D is transposed
            now = model.get_parameter(name).T if kind == "gpt2" else model.get_parameter(name)
            assert torch.allclose(now.double(), obvious(weight, 3, 8), atol=1e-6), name
    assert changed == {
        n for n, p in before.items() if p.dim() == 2 and not any(k in n for k in ("wte", "wpe", "embed", "lm_head"))
    }
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def adapted(**options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(causal("llama"), peft.LoraConfig(r=2, target_modules="all-linear", **options))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_adapters_are_merged_before_rounding(options: dict[str, object]) -> None:
    model = adapted(**options)
    ids = torch.arange(12).view(2, 6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with quantized(model, 4, group=8):
            found = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, plain)
        with quantized(model, 16, group=8):
            assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-3)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    whole = model.merge_and_unload()  # a model of its own, rounded by hand
    with torch.no_grad():
        for name, p in whole.named_parameters():
            if p.dim() == 2 and "embed" not in name and "lm_head" not in name:
                p.copy_(obvious(p, 4, 8))
        assert torch.allclose(whole(input_ids=ids).logits, found, atol=1e-4)


ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, {}),
    "output layer": ({"target_modules": ["q_proj", "lm_head"]}, {}),
    "DoRA": ({"target_modules": ["q_proj", "lm_head", "embed_tokens"], "use_dora": True}, {}),
    "tied": ({"target_modules": ["q_proj", "embed_tokens"]}, {"tie_word_embeddings": True}),
    "biases": ({"target_modules": ["q_proj", "v_proj"], "lora_bias": True}, {"attention_bias": True}),
    "whole modules": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, {}),
}


def llama_with(case: str, **options: Any) -> nn.Module:
    """A tiny Llama with one or two active adapters, all of whose numbers are random."""
    peft = pytest.importorskip("peft")
    of_adapters, of_model = ADAPTED[case]
    model = peft.get_peft_model(causal("llama", **of_model), peft.LoraConfig(r=2, **(of_adapters | options)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def differences(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> list[str]:
    """Names of parameters that have other bits, or other memory."""
    now = snapshot(model)
    assert list(now) == list(before)
    return [n for n, (place, p) in before.items() if now[n][0] != place or not torch.equal(now[n][1], p)]


def merged(model: nn.Module) -> list[list[str]]:
    return [list(m.merged_adapters) for m in model.modules() if hasattr(m, "adapter_layer_names")]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6)).logits


ties = pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning")  # PEFT


@ties
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("case", ADAPTED)
def test_every_weight_of_adapted_layers_is_restored_in_its_memory(case: str, fails: bool) -> None:
    model = llama_with(case)
    before, plain, flags = snapshot(model), logits(model), merged(model)
    try:
        with quantized(model, 4, group=8):
            places = {name: p.data_ptr() for name, p in model.named_parameters()}
            assert places == {name: place for name, (place, _) in before.items()}
            assert not torch.equal(logits(model), plain)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert not differences(model, before)
    assert merged(model) == flags
    assert torch.equal(logits(model), plain)


@ties
@pytest.mark.parametrize("case", ADAPTED)
def test_the_adapters_are_those_of_the_model(case: str) -> None:
    """In a tied model, merging an adapter of the embeddings would change the output layer."""
    model = llama_with(case)
    plain = logits(model)
    if case == "biases":
        model.merge_adapter()
        if not torch.allclose(logits(model), plain, atol=1e-2):
            pytest.skip("this version of PEFT merges biases into something else")
        model.unmerge_adapter()
    with quantized(model, 16, group=8):
        assert torch.allclose(logits(model), plain, atol=1e-2)


def test_layers_that_a_predicate_leaves_out_are_not_merged() -> None:
    model = llama_with("output layer", target_modules=["q_proj", "v_proj"])
    before = snapshot(model)
    with quantized(model, 4, params=lambda name, _: "v_proj.base_layer" in name):
        changed = differences(model, before)
    assert len(changed) == 2
    assert all("v_proj.base_layer" in name for name in changed)
    assert not differences(model, before)


def test_rounded_adapters_take_part_and_leave_nothing() -> None:
    model = llama_with("embeddings")
    before, plain = snapshot(model), logits(model)
    with quantized(model, 1, params=lambda name, _: "lora_A" in name):
        assert not torch.equal(logits(model), plain)
    assert not differences(model, before)


@pytest.mark.parametrize("dora", [False, True])
def test_merged_adapters_stay_merged(dora: bool) -> None:
    model = llama_with("output layer", target_modules=["q_proj", "v_proj"], use_dora=dora)
    model.merge_adapter()
    before, plain, flags = snapshot(model), logits(model), merged(model)
    with quantized(model, 4, group=8):
        assert merged(model) == flags
    assert not differences(model, before)
    assert merged(model) == flags
    with quantized(model, 4, group=8), model.disable_adapter():
        logits(model)  # PEFT unmerges in this pass
    assert not differences(model, before)
    assert merged(model) == flags
    assert torch.equal(logits(model), plain)


def test_disabled_adapters_are_not_merged() -> None:
    model = llama_with("output layer")
    before, plain = snapshot(model), logits(model)
    with model.disable_adapter():
        base = logits(model)
        with quantized(model, 16, group=8):
            assert torch.allclose(logits(model), base, atol=1e-2)
    assert not differences(model, before)
    with quantized(model, 4, group=8), model.disable_adapter():
        logits(model)  # PEFT unmerges in this pass
    assert not differences(model, before)
    assert torch.equal(logits(model), plain)
    model.merge_adapter()
    with model.disable_adapter(), pytest.raises(ValueError, match="unmerge_adapter"), quantized(model, 4):
        pass


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters_and_nested_use(dora: bool) -> None:
    model = llama_with("output layer", use_dora=dora)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    before, plain = snapshot(model), logits(model)
    with quantized(model, 8, group=8):
        outer, flags, found = snapshot(model), merged(model), logits(model)
        with quantized(model, 2, group=8):
            assert not torch.equal(logits(model), found)
        assert not differences(model, outer)
        assert merged(model) == flags
    assert not differences(model, before)
    assert not any(merged(model))
    assert torch.equal(logits(model), plain)


def test_a_quantized_base_is_not_merged() -> None:
    """PEFT cannot add to packed integers; with bitsandbytes it would round them again."""
    peft = pytest.importorskip("peft")
    model = Net()
    packed = model.first = PackedLinear(model.first)
    packed.in_features, packed.out_features = packed.infeatures, packed.outfeatures
    packed.weight = packed.qweight  # PEFT looks at its device
    config = peft.LoraConfig(r=2, target_modules=["first", "third"], init_lora_weights=False)
    config._register_custom_module({PackedLinear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(model, config)
    before, integers = snapshot(model), packed.qweight.clone()
    with quantized(model, 4, group=8):
        changed = differences(model, before)
        assert {name.split(".")[2] for name in changed} == {"second", "third", "head"}
        assert merged(model) == [[], ["default"]]
    assert not differences(model, before)
    assert torch.equal(packed.qweight, integers)


def test_restored_if_merging_fails() -> None:
    model = llama_with("output layer")
    before = snapshot(model)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj

    def merge() -> None:
        layer.base_layer.weight.data += 1
        raise KeyError

    layer.merge = merge
    with pytest.raises(KeyError), quantized(model, 4):
        pass
    assert not differences(model, before)
    assert not any(merged(model))


def test_restored_after_an_error_and_gradients_work_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    before = model[0].weight.detach().clone()

    def fail() -> None:
        with quantized(model, 2):
            model(torch.rand(2, 4)).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is not None


def test_predicate() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    before = [layer.weight.detach().clone() for layer in model]
    with quantized(model, 1, params=lambda name, _: name.startswith("1.")):
        assert torch.equal(model[0].weight, before[0])
        assert not torch.equal(model[1].weight, before[1])
    with pytest.raises(ValueError, match="no floating-point matrix"), quantized(nn.Embedding(3, 3), 4):
        pass
    with pytest.raises(ValueError, match="bits"), quantized(model, 0):
        pass


def test_one_scale_per_output_channel() -> None:
    weight = torch.randn(3, 100)
    found = rounded(weight, 3, group=None)
    assert torch.equal(found, rounded(weight, 3, group=100))
    assert [len(row.unique()) for row in found] == [8, 8, 8]
    assert torch.equal(rounded(weight.T, 3, group=None, dim=0), found.T)
    model = nn.Sequential(nn.Linear(200, 4))
    with quantized(model, 2, group=None):
        assert [len(row.unique()) for row in model[0].weight] == [4] * 4


def test_an_empty_tensor_stays_and_integers_are_refused() -> None:
    assert rounded(torch.empty(3, 0), 4).shape == (3, 0)
    with pytest.raises(ValueError, match=r"weight is torch\.int8"):
        rounded(torch.ones(2, 2, dtype=torch.int8), 4)


class Experts(nn.Module):
    """Two linear layers of a mixture, stacked in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.first = nn.Parameter(torch.randn(2, 8, 8)), nn.Linear(8, 8)
        self.convolution = nn.Conv1d(8, 8, 9)  # its weight has three dimensions, too


def test_stacked_experts_are_named() -> None:
    """Nothing would be lost by rounding a mixture whose experts stay as they are."""
    model = Experts()
    with (
        pytest.warns(UserWarning, match=r"128 weights in 1 parameters.*'stack'.*not rounded; 64 are") as found,
        quantized(model, 3),
    ):
        pass
    assert found[0].filename == __file__
    with quantized(model, 3, params=lambda name, p: name == "first.weight"):  # chosen by the caller: no warning
        pass
    model.stack = nn.Parameter(torch.randn(1, 1, 6))  # a class token
    with quantized(model, 3):
        pass
