"""Rounded weights against a loop over the groups; every weight is restored bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import quantized, rounded
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
