"""PerInstanceSAM: its special cases, its engines, its micro-batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.methods import ERM, SAM, PerInstanceSAM
from deltasam.objectives import R3F, SMART, VAT, Classification, Contrastive, EmbeddingNoise, NEFTune, RDrop
from deltasam.per_instance import InstancesMixedError, UncoveredError
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import gradient_errors, loop, relative
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT, grads, relative_error


@pytest.mark.parametrize("size", [1, 5])
def test_a_group_of_all_instances_is_sam(size: int) -> None:
    results = []
    for method in (PerInstanceSAM(rho=0.1, group=5), SAM(rho=0.1)):
        model, batch, objective = TRANSFORMER.make(size=size)
        torch.manual_seed(3)
        step = method.backward(model, batch, objective)
        results.append((grads(model), step))
    assert relative_error(results[0][0], results[1][0]) < 1e-9
    assert torch.allclose(results[0][1].losses, results[1][1].losses, rtol=1e-12)
    assert torch.allclose(results[0][1].perturbed_losses, results[1][1].perturbed_losses, rtol=1e-9)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_each_engine_equals_the_reference(engine: str, group: int) -> None:
    model, batch, objective = TRANSFORMER.make()

    def run() -> Tensor:
        torch.manual_seed(3)
        return objective(model, batch)

    exact = loop(model, run, 0.1, group)
    model.zero_grad()
    torch.manual_seed(3)
    step = PerInstanceSAM(rho=0.1, group=group, engine=engine).backward(model, batch, objective)
    assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) < 1e-9
    assert relative(step.losses, exact.losses) < 1e-9
    assert relative(step.perturbed_losses, exact.perturbed) < 1e-9
    members = torch.tensor([2.0, 2.0, 1.0]).double() if group == 2 else 1.0
    assert torch.allclose(step.grad_norm, (exact.norms / members).mean())


def test_rho_zero_is_erm_bit_for_bit() -> None:
    results = []
    for method in (PerInstanceSAM(rho=0.0), ERM()):
        model, batch, objective = TRANSFORMER.make(torch.float32)
        torch.manual_seed(3)
        method.backward(model, batch, objective)
        results.append(grads(model))
    assert all(torch.equal(g, results[1][n]) for n, g in results[0].items())


@pytest.mark.parametrize("engine", ["low-rank", "loop"])
def test_micro_batches_with_dropout_replay_their_own_masks(engine: str) -> None:
    """Every micro-batch has its own random draws, the same in both of its passes."""
    model, (inputs, labels), objective = TRANSFORMER.make(size=6)
    seen: list[Tensor] = []
    parts = MicroBatches([(inputs[:3], labels[:3]), (inputs[3:], labels[3:])])
    method = PerInstanceSAM(rho=0.1, engine=engine, group=3)
    method.backward(model, parts, objective)  # the first step makes extra passes for its comparison
    model.dropout.register_forward_hook(lambda module, args, out: seen.append(((out != 0) | (args[0] == 0)).clone()))
    method.backward(model, parts, objective)
    half = len(seen) // 2
    assert all(torch.equal(mask, seen[0]) for mask in seen[:half])
    assert all(torch.equal(mask, seen[half]) for mask in seen[half:])
    assert not torch.equal(seen[0], seen[half])


def test_the_loop_cuts_batches_of_library_objectives_and_agrees() -> None:
    results = []
    for engine in ("loop", "low-rank"):
        model, _, batch = make(BY_NAME["BERT"], 5)
        model.eval()
        step = PerInstanceSAM(rho=0.1, engine=engine, group=2).backward(model, batch, Classification())
        results.append((grads(model), step.perturbed_losses))
    assert relative_error(results[0][0], results[1][0]) < 1e-9
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-9)


def test_uncovered_parameters_fall_back_with_one_warning() -> None:
    architecture = BY_NAME["LSTM tagger"]
    model, run, batch = make(architecture, 4)
    exact = loop(model, run, 0.1)

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return architecture.losses(model, batch)

    with pytest.raises(UncoveredError, match="lstm"):
        PerInstanceSAM(rho=0.1, engine="low-rank").backward(model, batch, objective)
    method = PerInstanceSAM(rho=0.1)
    with pytest.warns(UserWarning, match=r"lstm.*LSTM.*register_rule.*one after the other"):
        method.backward(model, batch, objective)
    assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.backward(model, batch, objective)


def test_uncovered_parameters_can_be_skipped() -> None:
    architecture = BY_NAME["LSTM tagger"]
    model, run, batch = make(architecture, 4)
    for p in model.lstm.parameters():
        p.requires_grad_(False)
    exact = loop(model, run, 0.1)
    for p in model.lstm.parameters():
        p.requires_grad_(True)
    with pytest.warns(UserWarning, match="left unperturbed"):
        PerInstanceSAM(rho=0.1, uncovered="skip").backward(model, batch, architecture.losses)
    found = {n: p.grad for n, p in model.named_parameters()}
    assert gradient_errors(found, exact.gradient) < 1e-9
    assert found["lstm.weight_ih_l0"] is not None


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_objectives_that_mix_instances_are_refused(engine: str) -> None:
    x = torch.randn(4, 3)
    with pytest.raises(InstancesMixedError, match="Contrastive compares"):
        PerInstanceSAM(engine=engine).backward(nn.Linear(3, 2), (x, x), Contrastive())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(InstancesMixedError, match="BatchNorm1d"):
        PerInstanceSAM(engine=engine).backward(model, x, lambda m, x: m(x).square().sum(1))


def test_the_first_order() -> None:
    """l_i(w + eps_i) - l_i(w) -> rho ||grad_i||."""
    errors = []
    for rho in (1e-2, 1e-3, 1e-4):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make()
        exact = loop(model, lambda: objective(model, batch), rho)  # noqa: B023
        step = PerInstanceSAM(rho=rho).backward(model, batch, objective)
        rise = (step.perturbed_losses - step.losses) / rho
        errors.append(float((rise / exact.norms - 1).abs().max()))
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"group": 0}, "group=0"), ({"group": 1.5}, "group=1.5"), ({"engine": "fast"}, "engine='fast'"),
     ({"uncovered": "no"}, "uncovered='no'"), ({"rho": -1.0}, "rho=-1")],
)  # fmt: skip
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerInstanceSAM(**options)


@pytest.mark.parametrize("kind", [RDrop, R3F, VAT, EmbeddingNoise, NEFTune, SMART], ids=lambda kind: kind.__name__)
def test_over_objectives_that_call_the_model_in_their_own_ways(kind: Any) -> None:
    """Two views in one batch, two passes, inputs as embeddings, inner gradients, a teacher."""
    model, _, batch = make(BY_NAME["BERT"], 3)
    objective = kind(Classification(), total_steps=10) if kind is SMART else kind(Classification())
    if kind is SMART:
        objective.prepare(model)

    def run() -> Tensor:
        torch.manual_seed(3)
        return objective(model, batch)

    exact = loop(model, run, 0.1)
    model.zero_grad()
    torch.manual_seed(3)
    step = PerInstanceSAM(rho=0.1, engine="low-rank").backward(model, batch, objective)
    assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) < 1e-9
    assert relative(step.perturbed_losses, exact.perturbed) < 1e-9
