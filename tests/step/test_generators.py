"""Generators that modules own: the same noise in every pass of a step, and the draws of plain training afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.analysis import adversarial_risk, alignment
from deltasam.methods import ASAM, ERM, GSAM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.speed.capture._streams import Needs
from deltasam.step.randomness import Replay, generators_of, observed
from deltasam.weighting import Directional, OwnGradient

METHODS: dict[str, Callable[[], Method]] = {
    "sam": SAM,
    "asam": ASAM,
    "gsam": GSAM,
    "delta-sam": DeltaSAM,
    "directional": lambda: DeltaSAM(weighting=Directional()),
    "own-gradient": lambda: DeltaSAM(weighting=OwnGradient()),
    "low-rank": lambda: PerInstanceSAM(engine="low-rank"),
    "loop": lambda: PerInstanceSAM(engine="loop"),
}


class Noisy(nn.Module):
    """Dropout from a separate generator; keeps the masks that it drew, or uses given ones."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3) if generator is None else generator
        self.drawn: list[Tensor] = []
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.given:
            return x * self.given[0]
        mask = torch.rand(x.shape, generator=self.generator, dtype=torch.float64).round()
        self.drawn.append(mask)
        return x * mask


def model_with(noise: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), noise, nn.Linear(5, 1)).double()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


def batch() -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_every_pass_sees_the_noise_of_plain_training(make: Callable[[], Method]) -> None:
    """In each of three steps, against the same model with given masks, those of plain training."""
    plain, noise = Noisy(), Noisy()
    trained, model, method, other = model_with(plain), model_with(noise), make(), make()
    for step in range(3):
        noise.drawn.clear()
        ERM().backward(trained, batch(), objective)
        method.backward(model, batch(), objective)
        assert len(noise.drawn) > 1
        assert all(torch.equal(mask, plain.drawn[step]) for mask in noise.drawn)
        assert torch.equal(noise.generator.get_state(), plain.generator.get_state())
        fixed = Noisy()
        fixed.given = [plain.drawn[step]]
        reference = model_with(fixed)
        other.backward(reference, batch(), objective)
        torch.testing.assert_close(gradient(model), gradient(reference), rtol=1e-10, atol=1e-12)
        model.zero_grad()


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_micro_batches_continue_the_draws(make: Callable[[], Method]) -> None:
    plain, noise = Noisy(), Noisy()
    parts = MicroBatches([batch()[:3], batch()[3:]])
    ERM().backward(model_with(plain), parts, objective)
    make().backward(model_with(noise), parts, objective)
    for seen in noise.drawn:
        assert any(torch.equal(seen, mask) for mask in plain.drawn)
    assert torch.equal(noise.generator.get_state(), plain.generator.get_state())


def test_independent_passes_draw_other_noise_in_every_pass_and_step_and_consume_nothing() -> None:
    plain, noise = Noisy(), Noisy()
    trained, model, method = model_with(plain), model_with(noise), SAM(randomness="independent")
    x = batch().repeat(16, 1)
    for _ in range(2):
        ERM().backward(trained, x, objective)
        method.backward(model, x, objective)
    assert torch.equal(noise.generator.get_state(), plain.generator.get_state())
    assert len({tuple(mask.flatten().tolist()) for mask in noise.drawn}) == 4


def test_an_error_in_an_extra_pass_restores_the_generator() -> None:
    plain, noise = Noisy(), Noisy()
    model_with(plain)(batch())
    calls = []

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        losses = objective(model, x)
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return losses

    with pytest.raises(KeyboardInterrupt):
        SAM().backward(model_with(noise), batch(), failing)
    assert torch.equal(noise.generator.get_state(), plain.generator.get_state())


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_an_analysis_sees_the_same_noise_in_all_passes(engine: str) -> None:
    noise = Noisy()
    adversarial_risk(model_with(noise), [batch()], objective, rho=0.1, engine=engine)
    assert all(torch.equal(mask, noise.drawn[0]) for mask in noise.drawn)
    noise = Noisy()
    alignment(model_with(noise), [batch()], objective)
    assert all(torch.equal(mask, noise.drawn[0]) for mask in noise.drawn)


def test_a_replaced_shared_or_added_generator_is_found() -> None:
    noise = Noisy()
    model = nn.Sequential(noise, Noisy(noise.generator), nn.Linear(2, 2))
    for _ in range(3):
        assert generators_of(model) == (noise.generator,)
    noise.generator = torch.Generator()
    assert set(generators_of(model)) == {noise.generator, model[1].generator}
    model[2].late = torch.Generator()
    assert model[2].late in generators_of(model)
    noise.generator = None
    assert set(generators_of(model)) == {model[1].generator, model[2].late}
    del model[1]
    assert generators_of(model) == (model[1].late,)


def test_a_generator_made_by_the_first_pass_is_found_in_the_next_step() -> None:
    model = nn.Linear(2, 2)
    model.generator = None
    assert generators_of(model) == ()
    model.generator = torch.Generator()
    assert generators_of(model) == (model.generator,)


def test_attributes_are_searched_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Searches(dict):  # type: ignore[type-arg]
        written = 0

        def __setitem__(self, key: object, value: object) -> None:
            self.written += 1
            super().__setitem__(key, value)

    searches = Searches()
    monkeypatch.setattr("deltasam.step.randomness._SEARCHES", searches)
    model = nn.Linear(2, 2)
    for _ in range(5):
        Replay(model, ())
    assert searches.written == 2


def test_nothing_is_kept_alive() -> None:
    noise = Noisy()
    noise.owner = [noise]
    model = weakref.ref(noise)
    generators_of(noise)
    del noise
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("draws", [True, False])
def test_such_a_step_is_not_recorded(draws: bool) -> None:
    noise, needs = Noisy(), Needs(torch.device("cpu"))
    with observed(needs):
        Replay(noise, ())
        if draws:
            noise(torch.ones(1, dtype=torch.float64))
    needs.finish()
    assert ("its own" in str(needs.obstacle)) is draws
