"""Compares norms, adversarial losses of one and several steps, and the context with weights that are really moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches, instance_adversarial_losses, instance_gradient_norms, perturbed_instances
from deltasam.per_instance import adversarial
from deltasam.step.passes import Passes
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import ascended, groups_of, loop, relative
from helpers.problems import TRANSFORMER_NO_DROPOUT


@pytest.mark.parametrize(
    "name", ["BERT", "ALBERT", "BERT, masked-LM head (tied)", "T5", "MLP", "ResNet with GroupNorm"]
)
def test_several_ascent_steps_stay_in_the_ball(name: str) -> None:
    architecture = BY_NAME[name]
    model, run, batch = make(architecture, 3)
    model.eval()
    for engine in ("low-rank", "loop"):
        found = instance_adversarial_losses(
            model, batch, architecture.losses, rho=0.2, steps=3, stride=0.1, engine=engine
        )
        wanted = torch.cat([ascended(model, run, 0.2, 3, 0.1, [i]) for i in range(3)])
        assert relative(found, wanted) < max(1e-9, architecture.tolerance)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_groups_and_the_default_stride(engine: str, steps: int) -> None:
    architecture = BY_NAME["BERT"]
    model, run, batch = make(architecture, 5)
    model.eval()
    passes = Passes(model, batch, architecture.losses)
    losses, norms, worst = adversarial(passes, 0.2, steps=steps, group=2, engine=engine)
    exact = loop(model, run, 0.2, group=2)
    assert relative(losses, exact.losses) < 1e-9
    assert relative(norms, exact.norms) < 1e-9  # of the sums over the groups: two, two and one
    stride = 0.2 if steps == 1 else 2 * 0.2 / 3
    wanted = torch.cat([ascended(model, run, 0.2, steps, stride, members) for members in groups_of(5, 2)])
    assert relative(worst, wanted) < 1e-9


def test_more_steps_are_a_stronger_adversary() -> None:
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
    losses = [instance_adversarial_losses(model, batch, objective, rho=0.5, steps=k).mean() for k in (1, 5)]
    assert losses[1] > losses[0] > objective(model, batch).mean()


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_norms_and_context(engine: str) -> None:
    architecture = BY_NAME["BERT"]
    model, run, batch = make(architecture, 3)
    exact = loop(model, run, 0.1)
    torch.manual_seed(1)
    stream = torch.get_rng_state()
    norms = instance_gradient_norms(model, batch, architecture.losses, engine=engine)
    assert relative(norms, exact.norms) < 1e-9
    with perturbed_instances(model, batch, architecture.losses, rho=0.1) as found:
        assert relative(found, exact.norms) < 1e-9
        assert relative(run().detach(), exact.perturbed) < 1e-9
    assert torch.equal(torch.get_rng_state(), stream) or run is not None
    assert all(p.grad is None for p in model.parameters())


def test_selected_and_frozen_parameters() -> None:
    architecture = BY_NAME["BERT"]
    model, run, batch = make(architecture, 3)
    model.eval()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)  # BitFit
    exact = loop(model, run, 0.3)
    assert relative(instance_adversarial_losses(model, batch, architecture.losses, rho=0.3), exact.perturbed) < 1e-9
    for name, p in model.named_parameters():
        p.requires_grad_("LayerNorm" in name)
    exact = loop(model, run, 0.3)
    for p in model.parameters():
        p.requires_grad_(True)
    found = instance_adversarial_losses(model, batch, architecture.losses, rho=0.3, params="norms")
    assert relative(found, exact.perturbed) < 1e-9


BAD = {
    "steps=0": {"steps": 0},
    "steps=1.5": {"steps": 1.5},
    "rho=-0.1": {"rho": -0.1},
    "rho=nan": {"rho": float("nan")},
    "stride=-1": {"stride": -1},
    "group=0": {"group": 0},
    "engine='lop' must be": {"engine": "lop"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_options(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        instance_adversarial_losses(*small(), **BAD[message])


def test_bad_options_of_the_other_two() -> None:
    with pytest.raises(ValueError, match="engine='lop' must be"):
        instance_gradient_norms(*small(), engine="lop")
    with pytest.raises(ValueError, match="group=0"), perturbed_instances(*small(), group=0):
        pass
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module"):
        instance_gradient_norms(*small()[1:2], *small()[1:])


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_micro_batches_are_refused(engine: str) -> None:
    model, x, objective = small()
    with pytest.raises(ValueError, match="MicroBatches of 2"):
        instance_gradient_norms(model, MicroBatches([x, x]), objective, engine=engine)


def small() -> tuple[nn.Module, Tensor, Any]:
    return nn.Linear(2, 1), torch.ones(2, 2), lambda model, x: model(x).squeeze(-1)
