"""Random perturbation: its formula in float64, the statistics of its noise, which noise when, frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import RandomPerturbation, measured_arrival
from deltasam.methods._random_perturbation import row_scales
from deltasam.step.directions import random_direction
from deltasam.step.randomness import Seed
from helpers.adapted import adapted, task
from helpers.problems import CNN, TRANSFORMER, Problem, grads, relative_error
from helpers.promises import assert_intact, snapshot

Named = dict[str, Tensor]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1)


def noise_of(method: RandomPerturbation, model: nn.Module, batch: Any, objective: Any = squares) -> Named:
    """What the weights differ by during the pass."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found: Named = {}

    def looking(model: nn.Module, batch: Any) -> Tensor:
        found.update({name: p.detach() - before[name] for name, p in model.named_parameters()})
        return objective(model, batch)

    method.backward(model, batch, looking)
    return {name: value for name, value in found.items() if value.any()}


@pytest.mark.parametrize("problem", [TRANSFORMER, CNN], ids=lambda p: p.name)
@pytest.mark.parametrize("per", ["row", "all"])
def test_the_gradient_at_the_noise_of_the_formula(problem: Problem, per: str) -> None:
    rho, seed, steps = 0.3, 5, 2
    model, batch, objective = problem.make()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    z = dict(zip(trained, random_direction(list(trained.values()), Seed(seed, steps)), strict=True))
    with torch.no_grad():
        if per == "all":
            norm = torch.sqrt(sum(value.square().sum() for value in z.values()))
            for name, p in trained.items():
                p += rho * z[name] / norm
        else:
            for name, p in trained.items():
                rows = [(p[j], z[name][j]) for j in range(len(p))] if p.ndim > 1 else [(p, z[name])]
                for row, own in rows:
                    row += rho * row.norm() / row.numel() ** 0.5 * own
    torch.manual_seed(3)
    losses = objective(model, batch)
    losses.mean().backward()

    other, _, _ = problem.make()
    method = RandomPerturbation(rho=rho, per=per, seed=seed)  # type: ignore[arg-type]
    method.load_state_dict({"steps": steps})
    torch.manual_seed(3)
    step = method.backward(other, batch, objective)
    assert relative_error(grads(other), grads(model)) < 1e-10
    assert torch.allclose(step.losses, losses)
    assert step.grad_norm is step.skipped is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_noise_of_a_row_is_rho_times_its_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5000, 6).to(dtype)
    with torch.no_grad():
        model.weight.mul_(torch.tensor([0.0, 0.5, 1, 2, 4, 8], dtype=dtype)[:, None])
        model.bias.fill_(0.25)
    before = snapshot(model)
    noise = noise_of(RandomPerturbation(rho=0.2), model, torch.randn(3, 5000, dtype=dtype))
    assert_intact(model, before)
    weight = before["weights"]["weight"].double()
    assert not noise["weight"][0].any()
    ratios = noise["weight"][1:].double().norm(dim=1) / weight[1:].norm(dim=1)
    assert torch.allclose(ratios, torch.full_like(ratios, 0.2), rtol=0.05)
    z = noise["weight"][1:].double() / (0.2 * weight[1:].norm(dim=1, keepdim=True)) * 5000**0.5
    assert abs(float(z.mean())) < 0.03
    assert float((z.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.02)  # a normal distribution
    assert 0.005 < float(noise["bias"].double().norm() / before["weights"]["bias"].double().norm()) < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_noise_together_has_norm_rho(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 10)).to(dtype)
    noise = noise_of(RandomPerturbation(rho=0.7, per="all"), model, torch.randn(3, 300, dtype=dtype))
    norm = torch.sqrt(sum(value.double().square().sum() for value in noise.values()))
    assert float(norm) == pytest.approx(0.7, rel=1e-5 if dtype is torch.float32 else 0.05)
    assert set(noise) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_what_a_row_is() -> None:
    torch.manual_seed(0)
    filters = torch.randn(4, 3, 2, 2)
    assert torch.allclose(row_scales(filters), filters.square().mean((1, 2, 3), keepdim=True).sqrt())
    assert torch.allclose(row_scales(filters[0, 0], 1), filters[0, 0].square().mean(0, keepdim=True).sqrt())
    assert torch.allclose(row_scales(filters[0, 0, 0]), filters[0, 0, 0].square().mean().sqrt())
    assert torch.allclose(row_scales(torch.tensor(-2.0)), torch.tensor(2.0))
    assert row_scales(torch.empty(0, 3)).numel() == 0


def test_the_matrices_of_gpt2_are_transposed() -> None:
    model = adapted("GPT-2")
    batch, objective = task("GPT-2")
    layer = next(m for m in model.modules() if type(m).__name__ == "Conv1D" and m.weight.shape[0] == 16)
    with torch.no_grad():
        layer.weight[:, 1] = 0  # a neuron
    noise = noise_of(RandomPerturbation(params="base"), model, batch, objective)
    name = next(n for n, p in model.named_parameters() if p is layer.weight)
    assert (noise[name] == 0).all(0).nonzero().flatten().tolist() == [1]


def test_every_step_has_other_noise_and_the_same_after_a_resume() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    method = RandomPerturbation(seed=3)
    noises = [noise_of(method, model, x)["weight"] for _ in range(3)]
    assert not torch.allclose(noises[0], noises[1])
    assert not torch.allclose(noises[1], noises[2])
    resumed = RandomPerturbation(seed=3)
    resumed.load_state_dict({"steps": 2})
    assert torch.equal(noise_of(resumed, model, x)["weight"], noises[2])
    assert not torch.allclose(noise_of(RandomPerturbation(seed=4), model, x)["weight"], noises[0])


@pytest.mark.parametrize("variant", ["LoRA", "DoRA"])
def test_noise_on_frozen_matrices(variant: str) -> None:
    model, method = adapted("Llama", variant), RandomPerturbation(params="base")
    batch, objective = task("Llama")
    before = snapshot(model)
    noise = noise_of(method, model, batch, objective)
    assert_intact(model, before)
    assert all(name.endswith("base_layer.weight") for name in noise)
    assert len(noise) == 6
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained
    moved = adapted("Llama", variant)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if name in noise:
                p += noise[name]
    objective(moved, batch).mean().backward()
    assert relative_error(grads(model), grads(moved)) < 1e-12


def test_a_quantized_matrix_cannot_move() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 4, 3
            self.register_buffer("codes", torch.ones(3, 4, dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.codes.to(x.dtype).T

    model = nn.Sequential(nn.Linear(2, 4), Packed())
    with pytest.raises(ValueError, match=r"'1\.weight'.*quantized"):
        RandomPerturbation(params="all").backward(model, torch.randn(3, 2), squares)


def test_it_arrives() -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 100).bfloat16()
    with measured_arrival():
        step = RandomPerturbation(rho=0.01).backward(model, torch.randn(3, 200).bfloat16(), squares)
    assert float(step.arrived) == pytest.approx(1, abs=0.1)
