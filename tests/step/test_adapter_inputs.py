"""PEFT's casts of inputs are left out under autocast, where they change nothing, and always come back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltasam.step.adapter_inputs import SWITCH, without_input_casts

peft = pytest.importorskip("peft")


def adapted() -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(torch.bfloat16)
    model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape)  # PEFT's adapters of a half-precision model are float32
    return model


def casts(model: nn.Module) -> list[torch.dtype]:
    """The dtypes in which adapters get their inputs."""
    found: list[torch.dtype] = []
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, args: found.append(args[0].dtype))
    return found


def test_the_output_is_the_same_without_the_casts() -> None:
    pytest.importorskip("peft", "0.15")  # earlier versions always cast
    model, x = adapted(), torch.randn(3, 8, dtype=torch.bfloat16)
    seen = casts(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        with without_input_casts(model):
            after = model(x)
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert torch.equal(before, after)


def test_the_casts_stay_outside_autocast() -> None:
    model = adapted()
    seen = casts(model)
    with without_input_casts(model):
        model(torch.randn(3, 8, dtype=torch.bfloat16))
    assert seen == [torch.float32] * 2


def test_the_switch_is_restored_after_an_error() -> None:
    model = adapted()
    first = next(m for m in model.modules() if hasattr(m, "base_layer"))
    setattr(first, SWITCH, True)
    before = [vars(m).get(SWITCH, "class") for m in model.modules()]
    with pytest.raises(ZeroDivisionError), without_input_casts(model):
        raise ZeroDivisionError
    assert [vars(m).get(SWITCH, "class") for m in model.modules()] == before


def test_a_layer_that_the_user_has_switched_off_is_left_alone() -> None:
    model = adapted()
    first = next(m for m in model.modules() if hasattr(m, "base_layer"))
    setattr(first, SWITCH, False)
    with without_input_casts(model):
        assert vars(first)[SWITCH] is False
