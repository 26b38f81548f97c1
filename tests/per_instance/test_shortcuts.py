"""Shortcuts equal the rules, leave unusual modules to them, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.per_instance import record
from deltasam.per_instance.algebra.perturbation import Perturbation
from deltasam.per_instance.interception import shortcuts as _shortcuts
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import gradient_errors, loop, relative

EXACT = 1e-9


def outcome(model: nn.Module, run: Callable[[], Tensor], group: int = 1) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    recording = record(model, run, group=group)
    with recording.perturbed(0.1 / recording.norms):
        losses = run()
        losses.mean().backward()
    return [recording.norms, losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT", "BERT with LoRA (peft)"])
def test_shortcuts_equal_the_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, _ = make(BY_NAME[name], 5)
    short = outcome(model, run)
    assert {nn.Linear, nn.LayerNorm} <= {type(module) for module in model.modules()}
    monkeypatch.setattr(_shortcuts, "SHORTCUTS", {})
    long = outcome(model, run)
    for a, b in zip(short, long, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "BERT with LoRA (peft)"])
@pytest.mark.parametrize("group", [1, 2])
def test_the_form_for_a_gpu_that_waits_is_the_same_step(
    name: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run, _ = make(BY_NAME[name], 5)
    short = outcome(model, run, group)
    monkeypatch.setattr(Perturbation, "is_eager", True)
    for a, b in zip(short, outcome(model, run, group), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Own(nn.Linear):
    """Changes the forward of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() * 2


class Odd(nn.Module):
    """Modules that resemble those with a shortcut, but need the general path."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.own, self.patched = nn.Linear(6, 6), Own(6, 6), nn.Linear(6, 6)
        self.no_bias, self.frozen_bias, self.frozen_weight = (
            nn.Linear(6, 6, bias=False),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
        )
        self.norms = nn.ModuleList(
            [nn.LayerNorm((3, 6)), nn.LayerNorm(6, bias=False), nn.LayerNorm(6), nn.LayerNorm(6)]
        )
        self.bare = nn.LayerNorm(6, elementwise_affine=False)
        self.frozen_bias.bias.requires_grad_(False)
        self.frozen_weight.weight.requires_grad_(False)
        self.norms[3].weight.requires_grad_(False)
        forward = self.patched.forward
        self.patched.forward = lambda x: forward(x) ** 2
        self.seen = 0
        self.plain.register_forward_hook(self.count)

    def count(self, _module: nn.Module, _inputs: Any, _output: Tensor) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.patched(self.own(self.plain(input=x)))
        x = self.norms[2](self.norms[1](self.norms[0](x))) + self.bare(x)
        x = self.norms[3](self.no_bias(self.frozen_bias(self.frozen_weight(x)))) * x
        pooled = self.plain(self.norms[2](x[:, 0]))  # of two dimensions
        return self.no_bias(x.flatten(0, 1)).square().view(x.shape[0], -1).sum(1) + pooled.sum(1)  # of two, flat


@pytest.mark.parametrize("size", [1, 2, 5])
def test_unusual_modules_take_the_general_path(size: int) -> None:
    torch.manual_seed(size)
    model, x = Odd().double(), torch.randn(size, 3, 6).double()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    exact = loop(model, lambda: model(x), 0.1)
    model.zero_grad(set_to_none=True)
    model.seen = 0
    recording = record(model, lambda: model(x))
    with recording.perturbed(0.1 / recording.norms):
        model(x).mean().backward()
    assert model.seen >= 4  # hooks see their modules called
    assert relative(recording.norms, exact.norms) <= EXACT
    assert gradient_errors({name: p.grad for name, p in params.items()}, exact.gradient) <= EXACT
    assert list(vars(model.patched)).count("forward") == 1


def test_modules_have_their_own_forward_back_after_success_and_failure() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double(), torch.randn(3, 2, 4).double()

    def fail() -> Tensor:
        assert all("forward" in vars(module) for module in model)
        raise KeyboardInterrupt

    recording = record(model, lambda: model(x).sum((1, 2)))
    with recording.perturbed(0.1 / recording.norms):
        assert all("forward" in vars(module) for module in model)
    with pytest.raises(KeyboardInterrupt):
        record(model, fail, size=3)
    with pytest.raises(KeyboardInterrupt), recording.perturbed(0.1 / recording.norms):
        fail()
    assert not any("forward" in vars(module) for module in model)


def test_an_interruption_while_they_get_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4)

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(_shortcuts.SHORTCUTS, nn.LayerNorm, interrupt)  # the second one
    with pytest.raises(KeyboardInterrupt):
        record(model, lambda: model(x).sum(1), size=3)
    assert not any("forward" in vars(module) for module in model)
