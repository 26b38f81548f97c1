"""Frozen weights are perturbed through the adapters to other training loops as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.integrations import MethodOptimizer
from deltasam.methods import ASAM, GSAM, SAM, DeltaSAM, FriendlySAM, LookSAM, Method, PerInstanceSAM
from helpers.frozen import ADAPTED

METHODS = [SAM(rho=0.1), ASAM(rho=0.5), GSAM(rho=0.1), LookSAM(rho=0.3, k=2), FriendlySAM(rho=0.1)]


def trained(method: Method, style: str) -> dict[str, Tensor]:
    """The weights after some steps in this style."""
    method = method.replace(params="base", state={})
    model, batch, objective = ADAPTED.make()
    base = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)  # over frozen parameters, too
    optimizer = MethodOptimizer(base, method, model, closure="losses" if style != "backward" else "backward")
    torch.manual_seed(0)

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = objective(model, batch).mean()
        loss.backward()
        return loss

    for _ in range(3):
        if style == "loop":
            base.zero_grad()
            method.backward(model, batch, objective)
            base.step()
        elif style == "backward":
            optimizer.step(backward)
        elif style == "losses":
            optimizer.step(lambda: objective(model, batch))
        else:
            optimizer.step(lambda part: objective(model, part), batch)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def start() -> nn.Module:
    return ADAPTED.make()[0]


@pytest.mark.parametrize("style", ["backward", "losses", "batch"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_closure_is_the_loop(method: Method, style: str) -> None:
    found, wanted = trained(method, style), trained(method, "loop")
    for name, p in start().named_parameters():
        assert torch.allclose(found[name], wanted[name], rtol=1e-9, atol=1e-12), name
        assert torch.equal(found[name], p) != p.requires_grad, name


@pytest.mark.parametrize("method", [PerInstanceSAM(rho=0.1), DeltaSAM(rho=0.1)], ids=lambda m: type(m).__name__)
def test_a_closure_with_a_batch_is_the_loop(method: Method) -> None:
    found, wanted = trained(method, "batch"), trained(method, "loop")
    for name, p in start().named_parameters():
        assert torch.allclose(found[name], wanted[name], rtol=1e-6, atol=1e-9), name
        assert torch.equal(found[name], p) != p.requires_grad, name


@pytest.mark.parametrize("method", [PerInstanceSAM, SAM, DeltaSAM], ids=lambda m: m.__name__)
def test_the_trainer(method: Any, tmp_path: Path) -> None:
    """The adapters differ from those of plain training, and nothing else changes."""
    peft = pytest.importorskip("peft")
    from deltasam.integrations import MethodTrainer
    from helpers.trainers import arguments, classification_data, fresh, weights

    found = []
    for rho in (0.0, 0.3):
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value", "dense"], r=2)
        torch.manual_seed(0)
        model = peft.get_peft_model(fresh(), config)
        before = weights(model)
        own = method(rho=rho, params="base")
        options = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
        MethodTrainer(
            model=model, args=arguments(tmp_path, **options), method=own, train_dataset=classification_data()
        ).train()
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        after = weights(model)
        assert {name for name in after if not torch.equal(after[name], before[name])} == names
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        found.append({name: after[name] for name in names})
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) > 1e-5
