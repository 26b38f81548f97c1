"""The promises of all methods while they perturb frozen weights: only the gradient of the rest is left of it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches
from deltasam.methods import MomentumSAM
from helpers.frozen import ADAPTED, ADAPTED_NO_DROPOUT
from helpers.problems import Problem, grads, relative_error
from helpers.promises import assert_intact, skip_exempt, snapshot
from helpers.rows import ROWS, Row

_OTHER = {
    "erm",  # perturbs nothing
    "sam-no-bias-norm",  # is sam with another params
    "momentum-sam",  # follows gradients that train the model: refused below
}
_QUICK = {
    "sam", "delta-sam", "per-instance", "per-instance-groups", "asam", "gsam", "esam", "look-sam", "friendly-sam",
    "subset-sam", "fisher-sam", "wsam", "functional-sam",
}  # fmt: skip
rows = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row.name in _QUICK else pytest.mark.slow)
        for row in ROWS
        if row.name not in _OTHER
    ],
    ids=str,
)


def plain(problem: Problem, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model, batch, objective = problem.make(dtype)
    torch.manual_seed(3)
    objective(model, batch).mean().backward()
    return grads(model)


def run(row: Row, problem: Problem = ADAPTED, **changes: Any) -> tuple[Any, ...]:
    model, batch, objective = problem.make()
    torch.manual_seed(3)
    return model, row.method(params="base", **changes).backward(model, batch, row.wrap(objective))


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nothing_is_left(row: Row, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and (row.name.startswith("delta-sam") or row.name == "rw-sam"):
        pytest.skip("warns that bfloat16 rounds the probes, as for trained weights")
    model, batch, objective = ADAPTED.make(dtype)
    before, wanted = snapshot(model), set(plain(ADAPTED))
    method = row.method(params="base")
    for _ in range(3):
        method.backward(model, batch, row.wrap(objective))
        assert_intact(model, before)
        assert set(grads(model)) == wanted
    assert all(torch.isfinite(g).all() and bool(g.abs().sum() > 0) for g in grads(model).values())


@rows
def test_the_frozen_weights_are_perturbed(row: Row) -> None:
    model, batch, objective = ADAPTED.make()
    method = row.method(params="base")
    for _ in range(2 if "first-step-moves" in row.exempt else 1):
        model.zero_grad()
        torch.manual_seed(3)
        step = method.backward(model, batch, row.wrap(objective))
    wanted = plain(ADAPTED)
    assert relative_error(grads(model), wanted) > 1e-3
    assert not bool(step.skipped)


class BoomError(Exception):
    """Raised on purpose."""


@rows
@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt], ids=lambda e: e.__name__)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_any_pass_leaves_everything_intact(row: Row, error: type[BaseException], where: str) -> None:
    for failing in range(1, row.passes[0 if where == "forward" else 1] + 1):
        model, batch, objective = ADAPTED.make()
        objective(model, batch).sum().backward()  # gradients of an earlier micro-batch
        before, kept = snapshot(model), grads(model)
        calls = 0

        def fail(*_: Any, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise error

        def explosive(model: nn.Module, batch: Any, objective: Any = objective, fail: Any = fail) -> Tensor:
            losses = objective(model, batch)
            if where == "forward":
                fail()
            elif losses.requires_grad:
                losses.register_hook(fail)
            return losses

        with pytest.raises(error):
            row.method(params="base").backward(model, batch, row.wrap(explosive))
        assert_intact(model, before)
        assert grads(model).keys() == kept.keys()
        if where == "forward":  # backward may fail after it has added to some
            assert all(torch.equal(g, kept[name]) for name, g in grads(model).items())


@rows
def test_an_optimizer_over_all_parameters_never_sees_the_frozen_ones(row: Row) -> None:
    model, batch, objective = ADAPTED.make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    method = row.method(params="base")
    for _ in range(3):
        method.backward(model, batch, row.wrap(objective))
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
        assert (p in optimizer.state) == p.requires_grad, name


@rows
def test_passes_are_as_stated_and_random_streams_as_by_plain_training(row: Row) -> None:
    model, batch, objective = ADAPTED.make()
    torch.manual_seed(3)
    objective(model, batch).mean().backward()
    stream, other = torch.rand(3), random.getstate()
    _, step = run(row)
    assert torch.equal(torch.rand(3), stream)
    assert random.getstate() == other
    assert (step.forwards, step.backwards) == row.passes


@rows
@pytest.mark.parametrize("rho", [0.0, 1e-30])
def test_no_radius_is_plain_training(row: Row, rho: float) -> None:
    if rho:
        skip_exempt(row, "tiny-rho")
    model, _ = run(row, rho=rho)
    assert relative_error(grads(model), plain(ADAPTED)) < 1e-12


@rows
def test_one_instance_makes_the_weighted_methods_sam(row: Row) -> None:
    skip_exempt(row, "one-instance")
    found = []
    for other in (row, next(r for r in ROWS if r.name == "sam")):
        model, batch, objective = ADAPTED.make(size=1)
        torch.manual_seed(3)
        other.method(rho=row.rho, params="base").backward(model, batch, row.wrap(objective))
        found.append(grads(model))
    assert relative_error(*found) < 1e-10


@rows
def test_micro_batches_equal_the_large_batch(row: Row) -> None:
    skip_exempt(row, "micro-batches")
    found = []
    for split in (False, True):
        model, (inputs, labels), objective = ADAPTED_NO_DROPOUT.make(size=7)
        parts = MicroBatches([(inputs[:2], labels[:2]), (inputs[2:5], labels[2:5]), (inputs[5:], labels[5:])])
        row.method(params="base").backward(model, parts if split else (inputs, labels), row.wrap(objective))
        found.append(grads(model))
    assert relative_error(*found) < 1e-6  # the second differences amplify rounding


@rows
@pytest.mark.parametrize("scale", [2.0**12, torch.amp.GradScaler("cpu", init_scale=2.0**12)], ids=["number", "scaler"])
def test_scaling_the_loss_scales_the_gradient(row: Row, scale: Any) -> None:
    found = []
    for factor in (1.0, scale):
        model, batch, objective = ADAPTED.make()
        torch.manual_seed(3)
        step = row.method(params="base").backward(model, batch, row.wrap(objective), scale=factor)
        found.append((grads(model), step))
    assert relative_error({n: g / 2.0**12 for n, g in found[1][0].items()}, found[0][0]) < 1e-9
    if found[0][1].grad_norm is not None:
        assert torch.allclose(found[1][1].grad_norm, found[0][1].grad_norm, rtol=1e-9)


@rows
def test_gradients_accumulate_like_backward(row: Row) -> None:
    model, batch, objective = ADAPTED.make()
    first: dict[str, Tensor] = {}
    for _ in range(2):
        torch.manual_seed(3)
        row.method(params="base").backward(model, batch, row.wrap(objective))
        first = first or grads(model)
    assert relative_error(grads(model), {name: 2 * g for name, g in first.items()}) < 1e-12


@rows
def test_state_in_a_checkpoint_continues_exactly(row: Row) -> None:
    def train(model: nn.Module, method: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            method.backward(model, batch, row.wrap(objective))
            optimizer.step()
            optimizer.zero_grad()

    def start() -> tuple[Any, Any, Any]:
        model, _, _ = ADAPTED.make()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return model, row.method(params="base"), optimizer

    _, batch, objective = ADAPTED.make()
    model, method, optimizer = start()
    torch.manual_seed(3)
    train(model, method, optimizer, 4)
    parts = (model, method, optimizer)
    saved, stream = [copy.deepcopy(part.state_dict()) for part in parts], torch.get_rng_state()
    train(model, method, optimizer, 3)
    others = start()
    for part, state in zip(others, saved, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(stream)
    train(*others, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), others[0].parameters(), strict=True))


@rows
def test_every_frozen_parameter(row: Row) -> None:
    """Also embeddings, norms, biases, a tied head and one that is not used."""
    model, batch, objective = ADAPTED.make()
    before, wanted = snapshot(model), set(plain(ADAPTED))
    step = row.method(params="all").backward(model, batch, row.wrap(objective))
    assert_intact(model, before)
    assert set(grads(model)) == wanted
    assert not bool(step.skipped)


def test_momentum_sam_says_that_it_cannot() -> None:
    model, batch, objective = ADAPTED.make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"params='base'.*frozen.*params='trained'"):
        MomentumSAM(params="base").backward(model, batch, objective)
    assert_intact(model, before)
