"""Per-instance perturbations of frozen bfloat16 weights arrive; a move that is written to them would be lost."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import PerInstanceSAM
from helpers.frozen import base_names, reference
from helpers.instance_reference import Exact
from helpers.promises import assert_intact, snapshot

peft = pytest.importorskip("peft")
RHO = 0.01


def llama() -> nn.Module:
    """Weights of a pretrained model's size, frozen in bfloat16, and adapters in float32, as PEFT makes them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


@pytest.fixture(scope="module")
def exact() -> tuple[nn.Module, Tensor, Exact]:
    model = llama()
    ids = torch.randint(50, (8, 16))
    return model, ids, reference(model, lambda model: losses(model, ids), base_names(model), RHO)


def rise(perturbed: Tensor, start: Tensor) -> float:
    return float((perturbed.double() - start.double()).mean())


def test_the_rise_of_the_loss_is_that_of_exact_weights(exact: tuple[nn.Module, Tensor, Exact]) -> None:
    model, ids, wanted = exact
    before = snapshot(model)
    step = PerInstanceSAM(rho=RHO, params="base").backward(model, ids, losses)
    meant = rise(wanted.perturbed, wanted.losses)
    assert rise(step.perturbed_losses, step.losses) == pytest.approx(meant, rel=0.15)
    assert_intact(model, before)
    mine = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    theirs = torch.cat([g.flatten() for g in wanted.gradient.values()])
    assert float(torch.nn.functional.cosine_similarity(mine, theirs, dim=0)) > 0.99
    model.zero_grad()


def test_a_written_perturbation_would_be_lost(exact: tuple[nn.Module, Tensor, Exact]) -> None:
    """The same moves, rounded to nearest: what the first test guards against."""
    model, ids, wanted = exact
    written = []
    for i in range(len(ids)):
        other = deepcopy(model).double()
        names = base_names(other)
        moving = [p.requires_grad_(True) for name, p in other.named_parameters() if name in names]
        grads = torch.autograd.grad(losses(other, ids[i : i + 1]).sum(), moving)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        with torch.no_grad():
            for p, g in zip(moving, grads, strict=True):
                p.copy_((p + RHO * g / norm).bfloat16())
            written.append(losses(other, ids[i : i + 1]))
    share = rise(torch.cat(written), wanted.losses) / rise(wanted.perturbed, wanted.losses)
    assert share < 0.5


@pytest.mark.parametrize("group", [4, 8])
def test_groups_arrive_too(group: int) -> None:
    model = llama()
    ids = torch.randint(50, (8, 16))
    wanted = reference(model, lambda model: losses(model, ids), base_names(model), RHO, group)
    step = PerInstanceSAM(rho=RHO, params="base", group=group).backward(model, ids, losses)
    assert rise(step.perturbed_losses, step.losses) == pytest.approx(rise(wanted.perturbed, wanted.losses), rel=0.15)


def test_under_autocast() -> None:
    """The frozen weights are float32, on the grid of bfloat16, and used in bfloat16."""
    model = llama().float()
    ids = torch.randint(50, (8, 16))
    wanted = reference(model, lambda model: losses(model, ids), base_names(model), RHO)
    before = snapshot(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = PerInstanceSAM(rho=RHO, params="base").backward(model, ids, losses)
    assert rise(step.perturbed_losses, step.losses) == pytest.approx(rise(wanted.perturbed, wanted.losses), rel=0.15)
    assert_intact(model, before)
