"""Promise 7: the intended perturbation arrives, also if the weights are used in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import measured_arrival
from deltasam import methods as m
from deltasam.integrations import MethodOptimizer
from deltasam.step.norms import global_norm
from helpers.arrival import MODELS, cosine, exact, made, outcome, with_rounded_weights
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT, cross_entropy, grads
from helpers.promises import assert_intact, snapshot
from helpers.rows import ROWS, Row

pytest.importorskip("transformers")

# The methods that move the weights. The exact per-instance perturbation is added to layer outputs: no rounding.
# So is the perturbation of BiLoRA. MomentumSAM moves from its second step on: see test_buffers.py.
STILL = ("per-instance", "momentum", "bi-lora")
MOVING = [row for row in ROWS if row.rho is not None and not row.name.startswith(STILL)]
moving = pytest.mark.parametrize("row", MOVING, ids=str)


def method(row: Row, **changes: Any) -> m.Method:
    """With a radius far below the spacing of bfloat16; ASAM and FisherSAM scale theirs."""
    rho = {m.ASAM: 0.05, m.FisherSAM: 0.01}.get(type(row.method()), 0.004)
    return row.method(**{"rho": rho, **changes})


@moving
@pytest.mark.parametrize("source", ["bf16", "fp16", "4-bit"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_rises_and_the_gradient_turns_as_in_float32(row: Row, name: str, source: str) -> None:
    if row.name in ("delta-sam-own-gradient", "rw-sam-exact"):
        pytest.skip("the low-rank engine does not follow an objective that casts the weights itself")
    if row.passes == (1, 1):
        pytest.skip("has no losses at w to compare with: see test_random_perturbation.py")
    probes = row.name == "rw-sam" or (
        "delta-sam" in row.name and row.name not in ("delta-sam-uniform", "delta-sam-loss")
    )
    if source != "bf16" and probes:
        pytest.skip("the probes are at w, not at its rounded value, and their differences are small")
    model, batch = made(name, source)
    # Weights of linear layers are rounded to bfloat16 at w, too: the comparison is with that model.
    reference = made(name, source)[0]
    linear = [f"{n}." for n, module in reference.named_modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for n, p in reference.named_parameters():
            if n.startswith(tuple(linear)):
                p.copy_(p.bfloat16())
    meant = outcome(method(row), reference, batch, row.wrap(exact))
    found = outcome(method(row), model, batch, row.wrap(with_rounded_weights))
    assert found.rise == pytest.approx(meant.rise, rel=0.1)
    assert cosine(found.gradient, meant.gradient) > 0.99
    assert found.arrived == pytest.approx(1, abs=0.1)
    assert meant.arrived == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("source", ["bf16", "fp16"])
def test_rounding_to_nearest_would_not_do(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an implementation that adds the perturbation, which autocast then rounds."""
    model, batch = made("llama", source)
    meant = outcome(m.SAM(rho=0.004), model, batch, exact)
    monkeypatch.setattr("deltasam.step.moving.add_rounded", lambda w, move, grid, generator: w + move)
    found = outcome(m.SAM(rho=0.004), model, batch, with_rounded_weights)
    assert abs(found.rise / meant.rise - 1) > 0.2
    assert abs(found.arrived - 1) > 0.2


STORED = [(row, torch.bfloat16) for row in MOVING] + [(MOVING[0], torch.float16)]


@pytest.mark.parametrize(("row", "dtype"), STORED, ids=str)
@pytest.mark.filterwarnings("ignore:.*losses are computed in half precision.*")  # which makes poor probes
def test_weights_stored_in_half_precision_move(row: Row, dtype: torch.dtype) -> None:
    model, batch = made("bert", "none")
    model.to(dtype)
    before = snapshot(model)
    with measured_arrival():
        step = method(row).backward(model, batch, row.wrap(exact))
    assert float(step.arrived) == pytest.approx(1, abs=0.15)
    assert_intact(model, before)


def test_under_autocast_only_what_is_cast_is_rounded() -> None:
    """Embeddings and norms are used in float32, and move exactly; a tied table is cast in its second use."""
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
    at: list[dict[str, Tensor]] = []

    def look(model: nn.Module, batch: Any) -> Tensor:
        at.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return objective(model, batch)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        m.SAM(rho=0.01).backward(model, batch, look)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gradient = torch.autograd.grad(objective(model, batch).mean(), list(trained.values()), allow_unused=True)
    meant = {n: g for n, g in zip(trained, gradient, strict=True) if g is not None}
    step = 0.01 / global_norm(list(meant.values()))
    # An entry that does not move keeps its value.
    on_the_grid = {n: bool(((at[1][n] == at[0][n]) | (at[1][n] == at[1][n].bfloat16().float())).all()) for n in meant}
    exactly = {n: torch.allclose(at[1][n], at[0][n] + step * meant[n], rtol=1e-5, atol=1e-7) for n in meant}
    assert {n for n, is_exact in exactly.items() if is_exact} == {"norm.weight", "norm.bias"}
    rounded = {n for n, is_on in on_the_grid.items() if is_on}
    assert rounded == meant.keys() - {"norm.weight", "norm.bias"}


class InsideAutocast(nn.Module):
    """Autocast inside the model's forward, as in Accelerate and the Trainer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(*args).float()


def arrival(model: nn.Module, batch: Any, objective: Any, rho: float = 1e-3) -> float:
    """The mean over a few steps."""
    method = m.SAM(rho=rho)
    shares = []
    for _ in range(4):
        with measured_arrival():
            shares.append(float(method.backward(model, batch, objective).arrived))
    return sum(shares) / 4


@pytest.mark.parametrize("kind", ["around", "inside", "compiled"])
def test_wherever_autocast_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled parts hide their casts, so the type of the layer decides."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    batch = (torch.randn(8, 64), torch.randint(3, (8,)))
    model: Any = {"around": inner, "inside": InsideAutocast(inner)}.get(kind)
    if kind == "compiled":
        model = torch.compile(inner, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != "inside"):
        assert arrival(model, batch, cross_entropy) == pytest.approx(1, abs=0.1)


def test_through_a_closure() -> None:
    """The casts are in the graph of the loss that it returns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    inputs, labels = torch.randn(8, 64), torch.randint(3, (8,))
    optimizer = MethodOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), m.SAM(rho=0.004), model)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(model[0].weight.detach().clone())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    changed = seen[1] != seen[0]
    assert bool(changed.any())
    assert torch.equal(seen[1][changed], seen[1][changed].bfloat16().float())


@pytest.mark.parametrize("kind", ["rho", "skipped"])
def test_without_a_perturbation_it_is_plain_training_bit_for_bit(kind: str) -> None:
    factor = 1.0 if kind == "rho" else 1e-40  # such a loss has a gradient too small to divide by
    found = []
    for method in (m.ERM(), m.SAM(rho=0.0 if kind == "rho" else 0.05)):
        model, batch, _ = TRANSFORMER.make(torch.float32)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            method.backward(model, batch, lambda model, batch: cross_entropy(model, batch) * factor)
        found.append(grads(model))
    assert method.skipped == (kind == "skipped")
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_the_random_bits_are_the_methods_own() -> None:
    """New in every step, the same after a resume, different for another seed; the global streams do not move."""
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)

    def step(method: m.Method) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            method.backward(model, batch, objective)
        return torch.cat([g.flatten() for g in grads(model).values()])

    method, state = m.SAM(rho=0.004), torch.get_rng_state()
    first, second = step(method), step(method)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(step(m.SAM(rho=0.004)), first)
    resumed = m.SAM(rho=0.004)
    resumed.load_state_dict({"steps": 1})
    assert torch.equal(step(resumed), second)
    seeds = [m.DeltaSAM(rho=0.004, weighting=m.DeltaSAM().weighting, seed=seed) for seed in (0, 1)]
    assert not torch.equal(*[step(method) for method in seeds])


def test_the_share_that_arrived_is_measured_where_it_is_asked_for() -> None:
    model, batch, objective = TRANSFORMER.make(torch.float32)
    assert m.SAM().backward(model, batch, objective).arrived is None
    with measured_arrival():
        step = m.SAM().backward(model, batch, objective)
        assert m.ERM().backward(model, batch, objective).arrived is None
    assert step.metrics()["arrived"] == pytest.approx(1, abs=1e-4)
