"""In the loop over instances, too, every pass of a step has the same random draws; rho -> 0 is plain training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ERM, PerInstanceSAM, Step
from deltasam.objectives import R3F, Classification
from deltasam.per_instance import instance_adversarial_losses, instance_gradient_norms
from helpers.problems import grads, relative_error
from helpers.random_models import SOURCES, cross_entropies, noisy

pytestmark = pytest.mark.filterwarnings("ignore:.*draws random numbers:UserWarning")


def step_of(method: Any, objective: Any = Classification(), source: str = "dropout") -> tuple[dict[str, Tensor], Step]:  # noqa: B008
    model, batch = noisy(source)
    step = method.backward(model, batch, objective)
    return grads(model), step


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_a_vanishing_radius_is_plain_training(source: str, group: int) -> None:
    found, step = step_of(PerInstanceSAM(rho=1e-12, group=group, engine="loop"), source=source)
    wanted, at_w = step_of(ERM(), source=source)
    assert relative_error(found, wanted) < 1e-9
    torch.testing.assert_close(step.losses, at_w.losses)
    torch.testing.assert_close(step.perturbed_losses, at_w.losses)
    assert abs(float(step.sharpness)) < 1e-9


@pytest.mark.parametrize("source", SOURCES)
def test_an_objective_of_this_package_gives_what_a_function_gives(source: str) -> None:
    method, objectives = PerInstanceSAM(rho=0.1, engine="loop"), (Classification(), cross_entropies)
    results = [step_of(method, objective, source) for objective in objectives]
    assert relative_error(results[0][0], results[1][0]) < 1e-12
    torch.testing.assert_close(results[0][1].perturbed_losses, results[1][1].perturbed_losses)
    torch.testing.assert_close(results[0][1].grad_norm, results[1][1].grad_norm)


@pytest.mark.parametrize("measure", [instance_gradient_norms, instance_adversarial_losses], ids=lambda f: f.__name__)
def test_functions_of_one_batch(measure: Callable[..., Tensor]) -> None:
    found = []
    for objective in (Classification(), cross_entropies):
        model, batch = noisy()
        found.append(measure(model, batch, objective, engine="loop"))
    torch.testing.assert_close(*found)


def test_draws_of_the_objective_count() -> None:
    """R3F draws noise for the embeddings, also for a model in eval mode."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids).mean(1))

    objective, found = R3F(Classification(), eps=1.0, embeddings="words"), []
    for each in (objective, partial(objective)):
        torch.manual_seed(0)
        model, batch = Words().double().eval(), (torch.randint(9, (4, 5)), torch.arange(4) % 3)
        found.append(PerInstanceSAM(rho=0.1, engine="loop").backward(model, batch, each).perturbed_losses)
    torch.testing.assert_close(*found)


def test_one_warning_says_how_the_loop_is_faster() -> None:
    model, batch = noisy()
    method = PerInstanceSAM(rho=0.1, engine="loop")
    with pytest.warns(UserWarning, match=r"draws random numbers.*eval mode.*dropout 0"):
        method.backward(model, batch, Classification())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.backward(model, tuple(each[:5] for each in batch), Classification())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["eval", "dropout 0", "independent"])
def test_instances_are_cut_out_where_that_changes_nothing(mode: str) -> None:
    """Nothing is drawn, or passes share no draws anyway."""
    model, batch = noisy()
    model.train(mode != "eval")
    model.dropout.p = 0.0 if mode == "dropout 0" else 0.5
    randomness = "independent" if mode == "independent" else "shared"
    PerInstanceSAM(rho=0.1, engine="loop", randomness=randomness).backward(model, batch, Classification())
    assert model.rows == [6] + 2 * 6 * [1]
    model.rows.clear()
    instance_adversarial_losses(model.eval(), batch, Classification(), engine="loop")
    assert model.rows == [6] + 2 * 6 * [1]


@pytest.mark.filterwarnings("error")
def test_draws_of_other_threads_do_not_count() -> None:
    """A thread that loads data shares Python's stream with the model."""
    model, batch = noisy()
    model.eval()
    with ThreadPoolExecutor(1) as loader:
        model.register_forward_pre_hook(lambda *_: loader.submit(random.seed).result())
        PerInstanceSAM(rho=0.1, engine="loop").backward(model, batch, Classification())
    assert model.rows == [6] + 2 * 6 * [1]


@dataclass(frozen=True, kw_only=True)
class HalfAtW(Classification):
    """Half of the logits stays at w."""

    @property
    def has_unperturbed_part(self) -> bool:
        return True

    def unperturbed(self, model: nn.Module, batch: Any) -> Tensor:
        return super().forward(model, batch)

    def complete(self, model: nn.Module, batch: Any, unperturbed: Tensor) -> Tensor:
        return (super().forward(model, batch) + unperturbed) / 2

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.complete(model, batch, super().forward(model, batch))


def test_a_part_that_stays_at_w_stays_there_in_a_whole_batch() -> None:
    """Without noise a batch is cut, and the results are the same."""
    found = []
    for p in (0.0, 1e-300):  # draws, and drops nothing
        model, batch = noisy()
        model.dropout.p = p
        step = PerInstanceSAM(rho=0.1, engine="loop").backward(model, batch, HalfAtW())
        found.append((grads(model), step.perturbed_losses))
        assert (1 in model.rows) == (p == 0)
    assert relative_error(found[0][0], found[1][0]) < 1e-12
    torch.testing.assert_close(found[0][1], found[1][1])
