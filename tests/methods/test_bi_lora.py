"""Bi-LoRA against the equations of the paper, with explicit matrices in float64; its state; its layers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam import BiLoRA, Contrastive, MicroBatches
from deltasam.methods import Method
from deltasam.step.adapters import adapted_layers
from deltasam.step.auxiliary import added, places_beside
from helpers.adapted import adapted, task
from helpers.problems import grads, relative_error
from helpers.promises import assert_intact, snapshot

pytest.importorskip("peft")

RHO, LR, RANK = 0.4, 0.5, 2
VARIANTS = [(name, "LoRA") for name in ("Llama", "GPT-2", "T5", "BERT")]
VARIANTS += [("Llama", "rsLoRA"), ("Llama", "DoRA"), ("GPT-2", "DoRA"), ("Llama", "embeddings")]
variants = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=lambda value: value)
Matrices = dict[str, Tensor]


@contextmanager
def with_matrices(model: nn.Module, matrices: Matrices) -> Iterator[None]:
    """Adds ``E x`` to the outputs of layers, with whole matrices E (outputs, inputs)."""

    def add(matrix: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        x = args[0]
        return output + (F.one_hot(x, matrix.shape[1]).double() if not x.is_floating_point() else x) @ matrix.T

    layers = adapted_layers(model)
    handles = [layers[name].register_forward_hook(partial(add, matrix)) for name, matrix in matrices.items()]
    yield
    for handle in handles:
        handle.remove()


def descend(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(lr * p.grad)


class Reference:
    """Eq. 9 and 10 of the paper, to the letter: G is the gradient of the merged matrix."""

    def __init__(self, factors: dict[str, tuple[Tensor, Tensor]], climb: str, rho: float) -> None:
        self.rho = rho
        self.pairs = {name: [factor.clone() for factor in pair] for name, pair in factors.items()}
        every = [factor for pair in self.pairs.values() for factor in pair]
        self.adam = torch.optim.Adam(every, lr=LR, maximize=True) if climb == "adam" else None

    def step(self, model: nn.Module, batch: Any, objective: Any) -> None:
        matrices = {name: (b @ a).requires_grad_() for name, (a, b) in self.pairs.items()}
        with with_matrices(model, matrices):
            objective(model, batch).mean().backward()
        for name, (a, b) in self.pairs.items():
            g = matrices[name].grad
            assert g is not None
            a.grad, b.grad = b.T @ g, g @ a.T
        if self.adam is not None:
            self.adam.step()
        else:
            for pair in self.pairs.values():
                for factor in pair:
                    factor += LR * factor.grad
        norm = torch.sqrt(sum((b @ a).square().sum() for a, b in self.pairs.values()))
        if norm > self.rho:
            for pair in self.pairs.values():
                for factor in pair:
                    factor *= (self.rho / norm).sqrt()
        self.norm = float(norm)


def flat(factors: dict[str, Any]) -> Matrices:
    return {
        f"{name}.{which}": value for name, pair in factors.items() for which, value in zip("AB", pair, strict=True)
    }


@variants
@pytest.mark.parametrize(("climb", "rho"), [("gradient", 1.0), ("gradient", 1e-4), ("adam", 0.1)])
def test_several_steps_follow_the_equations(name: str, variant: str, climb: str, rho: float) -> None:
    method = BiLoRA(rho=rho, lr=LR, rank=RANK, climb=climb)  # type: ignore[arg-type]
    model, other = adapted(name, variant), adapted(name, variant)
    start = BiLoRA(lr=0.0, rank=RANK)
    start.backward(adapted(name, variant), *task(name))
    factors = start.factors(model)
    assert all(bool((a != 0).all()) and not b.any() for a, b in factors.values())
    assert set(factors) == set(adapted_layers(model))
    reference, norms = Reference(factors, climb, rho), []
    for number in range(5):
        model.zero_grad()
        other.zero_grad()
        step = method.backward(model, *task(name, seed=number))
        assert (step.forwards, step.backwards) == (1, 1)
        reference.step(other, *task(name, seed=number))
        assert relative_error(grads(model), grads(other)) < 1e-9
        assert relative_error(flat(method.factors(model)), flat(reference.pairs)) < 1e-9
        norms.append(reference.norm)
        descend(model)
        descend(other)
    assert max(norms) < rho if rho == 1 else min(norms) > rho  # without clipping, and with it


def test_merged_into_the_frozen_matrix_it_is_the_same() -> None:
    """The pair beside a layer with LoRA equals B A written into W."""
    model, method = adapted("Llama"), BiLoRA(rho=RHO, lr=LR, rank=RANK)
    batch, objective = task("Llama")
    for _ in range(3):
        model.zero_grad()
        before = {name: (a.clone(), b.clone()) for name, (a, b) in method.factors(model).items()}
        method.backward(model, batch, objective)
    wanted, other = grads(model), adapted("Llama")
    with torch.no_grad():
        for name, layer in adapted_layers(other).items():
            a, b = before[name]
            layer.base_layer.weight += b @ a  # type: ignore[union-attr, operator]
    objective(other, batch).mean().backward()
    assert relative_error(grads(other), wanted) < 1e-10
    model.zero_grad()
    objective(model, batch).mean().backward()
    assert relative_error(grads(model), wanted) > 1e-3


def test_it_climbs() -> None:
    """With fixed weights the loss rises from step to step, up to the radius."""
    model, method = adapted("Llama"), BiLoRA(rho=0.3)
    batch, objective = task("Llama")
    losses = [float(method.backward(model, batch, objective).loss) for _ in range(45)]
    assert losses[40] > losses[30] > losses[20] > losses[10] > losses[0] + 0.01
    norm = torch.sqrt(sum((b @ a).square().sum() for a, b in method.factors(model).values()))
    assert float(norm) == pytest.approx(0.3, rel=1e-6)


@variants
def test_nothing_of_it_is_in_the_model(name: str, variant: str, tmp_path: Path) -> None:
    model, method = adapted(name, variant), BiLoRA(rho=RHO, lr=LR)
    before, keys = snapshot(model), list(model.state_dict())
    for _ in range(2):
        method.backward(model, *task(name))
    assert_intact(model, before)
    assert list(model.state_dict()) == keys
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
    model.save_pretrained(tmp_path, save_embedding_layers=False)  # type: ignore[operator]
    from safetensors.torch import load_file

    assert not any("aux" in key for key in load_file(tmp_path / "adapter_model.safetensors"))


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("climb", ["gradient", "adam"])
def test_a_resumed_run_continues_exactly(climb: str) -> None:
    def run(method: Method, model: nn.Module, numbers: range) -> None:
        for number in numbers:
            model.zero_grad()
            method.backward(model, *task("Llama", seed=number))
            descend(model)

    method = BiLoRA(rho=RHO, lr=LR, climb=climb)  # type: ignore[arg-type]
    model, other = adapted("Llama"), adapted("Llama")
    run(method, model, range(3))
    file = io.BytesIO()
    torch.save((method.state_dict(), model.state_dict()), file)
    run(method, model, range(3, 6))
    file.seek(0)
    state, weights = torch.load(file)
    again = method.replace(state={})
    again.load_state_dict(state)
    other.load_state_dict(weights)
    run(again, other, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(again.state[name], method.state[name]) for name in state if name != "steps")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("climb", ["gradient", "adam"])
def test_a_step_that_is_not_finite_leaves_the_pairs_alone(bad: float, climb: str) -> None:
    model, method = adapted("Llama"), BiLoRA(rho=RHO, lr=LR, climb=climb)  # type: ignore[arg-type]
    batch, objective = task("Llama")
    for first in (True, False):  # also before there are moments
        if not first:
            method.backward(model, batch, objective)
        kept = method.state_dict()
        step = method.backward(model, batch, lambda m, x: objective(m, x) * bad)
        assert bool(step.skipped)
        assert "not finite" in str(step.why_skipped)
        for name in ("auxiliary", "mean", "square", "ascents"):
            assert name not in kept or torch.equal(method.state[name], kept[name])
    assert torch.isfinite(method.state["auxiliary"]).all()
    assert not bool(method.backward(model, batch, objective).skipped)


@pytest.mark.parametrize("scale", [3.0, torch.tensor(2.0**10), torch.amp.GradScaler("cpu", init_scale=2.0**12)])
def test_the_loss_scale_does_not_matter(scale: Any) -> None:
    found = []
    for factor in (1.0, scale):
        model, method = adapted("Llama"), BiLoRA(rho=RHO, lr=LR, climb="gradient")
        for number in range(3):
            step = method.backward(model, *task("Llama", seed=number), scale=factor)
        found.append((flat(method.factors(model)), step.grad_norm))
    assert relative_error(found[1][0], found[0][0]) < 1e-6
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-6)


def test_micro_batches_are_one_ascent() -> None:
    found = []
    for split in (False, True):
        model, method = adapted("BERT"), BiLoRA(rho=RHO, lr=LR, climb="gradient")
        for number in range(3):
            model.zero_grad()
            batch, objective = task("BERT", seed=number)
            parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
            step = method.backward(model, MicroBatches(parts) if split else batch, objective)
            assert (step.forwards, step.backwards) == (1, 1)
        found.append((grads(model), flat(method.factors(model))))
    assert relative_error(found[1][0], found[0][0]) < 1e-10
    assert relative_error(found[1][1], found[0][1]) < 1e-10


def test_the_seed_decides_the_start() -> None:
    starts = []
    for seed in (0, 0, 1):
        method, model = BiLoRA(lr=0.0, seed=seed), adapted("Llama")
        torch.manual_seed(len(starts))
        method.backward(model, *task("Llama"))
        starts.append(method.state["auxiliary"])
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    a = next(iter(method.factors(model).values()))[0]
    assert 0.5 < float(a.abs().max()) * a.shape[1] ** 0.5 <= 1


def test_the_state_of_another_model() -> None:
    method = BiLoRA()
    method.backward(adapted("Llama"), *task("Llama"))
    with pytest.raises(ValueError, match=r"keeps 'auxiliary' with shape .*another model"):
        method.backward(adapted("GPT-2"), *task("GPT-2"))
    with pytest.raises(ValueError, match="another model"):
        method.replace(rank=3).factors(adapted("Llama"))


# -- layers -----------------------------------------------------------------------------------------------------------


def test_a_model_without_adapters() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"no adapters: adapt matrices with peft"):
        BiLoRA().backward(model, torch.randn(4, 3), lambda m, x: m(x).squeeze(-1))
    with pytest.raises(ValueError, match=r"selects no matrix .*'0.weight'.*params='base'"):
        BiLoRA(params="norms").backward(
            nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)), torch.randn(4, 3), lambda m, x: m(x).squeeze(-1)
        )


def test_merged_adapters() -> None:
    model = adapted("Llama")
    model.merge_adapter()  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"merged.*unmerge_adapter"):
        BiLoRA().backward(model, *task("Llama"))


def test_disabled_adapters_disable_the_pair() -> None:
    """A reference model inside the objective, as in DPO, is the model before training."""
    model, method, seen = adapted("Llama"), BiLoRA(rho=RHO, lr=LR), []
    batch, objective = task("Llama")

    def with_reference(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad(), model.disable_adapter():  # type: ignore[operator]
            seen.append(objective(model, batch))
        return objective(model, batch)

    steps = [method.backward(model, batch, with_reference) for _ in range(3)]
    assert torch.equal(seen[0], seen[2])
    assert not torch.allclose(steps[0].losses, steps[2].losses)


class Experts(nn.Module):
    """Layers of which one is called, by its keyword, and another one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(input=x)).squeeze(-1).square()


def test_a_layer_that_is_not_called_keeps_its_pair() -> None:
    torch.manual_seed(0)
    model, method = Experts().double(), BiLoRA(params="trained", lr=0.1)
    for _ in range(3):
        method.backward(model, torch.randn(4, 3).double(), lambda m, x: m(x))
    factors = method.factors(model)
    assert not factors["second"][1].any()
    assert factors["first"][1].all()


def test_quantized_layers() -> None:
    """A layer without a matrix of its own gets the pair of its shape."""

    class Packed(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = layer.in_features, layer.out_features
            self.register_buffer("codes", (layer.weight.data * 64).round().to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.codes.to(x.dtype) / 64).T

    torch.manual_seed(0)
    linear = nn.Linear(4, 3, bias=False).double()
    packed = Packed(linear)
    linear.weight.data = packed.codes.double() / 64
    found = []
    for base in (linear, packed):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 4).double(), base)
        method = BiLoRA(params=lambda name, p: name.startswith("1"), lr=LR)
        codes = packed.codes.clone()
        for number in range(3):
            model.zero_grad()
            x = torch.randn(5, 2, generator=torch.Generator().manual_seed(number)).double()
            method.backward(model, x, lambda m, x: m(x).square().sum(-1))
        assert torch.equal(packed.codes, codes)
        found.append({"gradient": model[0].weight.grad, "auxiliary": method.state["auxiliary"]})
    assert relative_error(found[1], found[0]) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    found = []
    for enabled in (False, True):
        model, method = adapted("Llama"), BiLoRA(rho=RHO, lr=LR)
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
            model.enable_input_require_grads()  # type: ignore[operator]
        for number in range(3):
            model.zero_grad()
            method.backward(model, *task("Llama", seed=number))
        found.append((grads(model), flat(method.factors(model))))
    assert relative_error(found[1][0], found[0][0]) < 1e-10
    assert relative_error(found[1][1], found[0][1]) < 1e-10


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_low_precision(stored: torch.dtype) -> None:
    """The pairs stay in float32; under autocast, and with weights in bfloat16, they follow the float64 run."""
    found = []
    for dtype in (torch.float64, stored):
        model, method = adapted("Llama").to(dtype), BiLoRA(rho=RHO, lr=0.2, climb="gradient")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.float32):
            for number in range(4):
                model.zero_grad()
                method.backward(model, *task("Llama", seed=number))
        found.append({name: (b @ a).double() for name, (a, b) in method.factors(model).items()})
        assert method.state["auxiliary"].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert relative_error(found[1], found[0]) < 0.1


def test_an_objective_of_which_a_part_stays_at_w() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    first, second = torch.randn(2, 6, 5).double()
    objective, method = Contrastive(temperature=0.5), BiLoRA(params="trained", rho=RHO, lr=LR)
    for _ in range(3):
        pairs = [(a.clone(), b.clone()) for a, b in method.factors(model).values()]
        model.zero_grad()
        step = method.backward(model, (first, second), objective)
    wanted = grads(model)
    model.zero_grad()
    h1 = model(first)
    with added(places_beside(model, dict(model.named_parameters())), pairs):
        h2 = model(second)
    losses = objective.losses(torch.stack((h1, h2)), None)
    losses.mean().backward()
    assert torch.allclose(step.losses, losses)
    assert relative_error(grads(model), wanted) < 1e-10


def test_a_compiled_model_runs_as_written() -> None:
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        used = torch.compile(model, backend="eager") if compile_it else model
        x = torch.randn(6, 5).double()
        used(x)
        method = BiLoRA(params="trained", rho=RHO, lr=LR)
        losses = [method.backward(used, x, lambda m, x: m(x).squeeze(-1).square()).loss for _ in range(3)]
        found.append(torch.stack(losses))
    assert torch.allclose(*found)
    assert found[0][2] > found[0][0]
