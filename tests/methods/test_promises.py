"""All methods x all promises of the design. A method joins by a row in ``helpers/rows.py``."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltasam import MicroBatches
from helpers.problems import CNN, TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, grads, relative_error
from helpers.regulariser_rows import ROWS as REGULARISER_ROWS
from helpers.rows import ROWS, Row

PROBLEMS = [TRANSFORMER, CNN]
rows = pytest.mark.parametrize("row", ROWS + REGULARISER_ROWS, ids=str)
problems = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)


def skip_exempt(row: Row, promise: str) -> None:
    if promise in row.exempt:
        pytest.skip(f"{row}: {promise} cannot hold by definition, see helpers/rows.py")


def run(row: Row, problem: Problem, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, ...]:
    model, batch, objective = problem.make(dtype)
    torch.manual_seed(3)
    step = row.method(**changes).backward(model, batch, row.wrap(objective))
    return model, step


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "pointers": {n: p.data_ptr() for n, p in model.named_parameters()},
        "objects": {n: id(p) for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
    }


def assert_intact(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for name, value in before["weights"].items():
        assert torch.equal(after["weights"][name], value), f"{name} changed"
    for key in ("pointers", "objects", "flags", "modes", "hooks"):
        assert after[key] == before[key], key


# -- 1. weights, buffers, flags, random streams ---------------------------------------------------------------------


@rows
@problems
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_come_back_bit_for_bit(row: Row, problem: Problem, dtype: torch.dtype) -> None:
    skip_exempt(row, problem.name)
    model, batch, objective = problem.make(dtype)
    before = snapshot(model)
    method = row.method()
    for _ in range(3):
        method.backward(model, batch, row.wrap(objective))
        assert_intact(model, before)
    assert all(torch.isfinite(g).all() for g in grads(model).values())


class BoomError(Exception):
    """Raised on purpose."""


@rows
@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt], ids=lambda e: e.__name__)
def test_an_exception_in_any_pass_leaves_everything_intact(row: Row, error: type[BaseException]) -> None:
    for failing in range(1, row.passes[0] + 1):
        model, batch, objective = TRANSFORMER.make()
        (objective(model, batch).sum()).backward()  # gradients of an earlier micro-batch
        before, kept = snapshot(model), grads(model)
        calls = 0

        def explosive(model: nn.Module, batch: Any, failing: int = failing, objective: Any = objective) -> Tensor:
            nonlocal calls
            calls += 1
            losses = objective(model, batch)
            if calls == failing:
                raise error
            return losses

        with pytest.raises(error):
            row.method().backward(model, batch, row.wrap(explosive))
        assert_intact(model, before)
        assert all(torch.equal(g, kept[n]) for n, g in grads(model).items())


@rows
def test_an_exception_in_any_backward_leaves_the_weights_intact(row: Row) -> None:
    for failing in range(1, row.passes[1] + 1):
        model, batch, objective = TRANSFORMER.make()
        before = snapshot(model)
        calls = 0

        def explode(grad: Tensor, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise BoomError

        def explosive(model: nn.Module, batch: Any, objective: Any = objective) -> Tensor:
            losses = objective(model, batch)
            if losses.requires_grad:
                losses.register_hook(explode)
            return losses

        with pytest.raises(BoomError):
            row.method().backward(model, batch, row.wrap(explosive))
        assert_intact(model, before)


@rows
@problems
def test_random_streams_and_buffers_are_left_as_by_plain_training(row: Row, problem: Problem) -> None:
    skip_exempt(row, problem.name)
    model, batch, objective = problem.make()
    torch.manual_seed(3)
    row.wrap(objective)(model, batch).mean().backward()
    stream = torch.rand(3)
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    model, batch, objective = problem.make()
    others = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the stream that is replayed
    pointers = {n: b.data_ptr() for n, b in model.named_buffers()}
    torch.manual_seed(3)
    row.method().backward(model, batch, row.wrap(objective))
    assert torch.equal(torch.rand(3), stream)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others  # noqa: NPY002
    for name, buffer in model.named_buffers():
        if (row.name == "subset-sam" or "buffers-at-w" in row.exempt) and name != "bn.num_batches_tracked":
            continue  # its full pass, the one that counts, is at w + eps
        assert torch.equal(buffer, buffers[name]), name
        assert buffer.data_ptr() == pointers[name]


@rows
def test_no_drift_in_a_thousand_steps_at_learning_rate_zero(row: Row) -> None:
    if row.name not in {"sam", "delta-sam", "gsam", "look-sam"}:
        pytest.skip("the slow check runs over one method of each kind; bit-exactness is checked for all above")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
        before = snapshot(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        method, x = row.method(), torch.randn(4, 3, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bfloat16 rounds the probes away is said, and tested elsewhere
            for _ in range(1000):
                method.backward(model, x, lambda model, x: model(x).float().square().mean(-1))
                optimizer.step()
                optimizer.zero_grad()
        assert_intact(model, before)


# -- 2. the same randomness in every pass ---------------------------------------------------------------------------


@rows
def test_every_pass_sees_the_same_masks(row: Row) -> None:
    if row.name in {"esam", "subset-sam"}:
        pytest.skip("a pass over a part of the batch draws masks of another shape")
    model, batch, objective = TRANSFORMER.make()
    seen = []
    model.dropout.register_forward_hook(lambda m, args, out: seen.append(((out != 0) | (args[0] == 0)).clone()))
    if "directional" in row.name:
        model.dropout._forward_hooks.clear()
        pytest.skip("forward mode hides the mask from a hook; the derivative tests below compare values")
    row.method(randomness="shared").backward(model, batch, row.wrap(objective))
    assert all(torch.equal(mask, seen[0]) for mask in seen)
    assert len(seen) == row.passes[0] or "passes" in row.exempt
    seen.clear()
    row.method(randomness="independent").backward(model, batch, row.wrap(objective))
    assert len(seen) == 1 or not all(torch.equal(mask, seen[0]) for mask in seen[1:])


# -- 3. special cases that must coincide ----------------------------------------------------------------------------


def plain(problem: Problem, row: Row, dtype: torch.dtype = torch.float64, size: int = 5) -> dict[str, Tensor]:
    model, batch, objective = problem.make(dtype, size)
    torch.manual_seed(3)
    row.wrap(objective)(model, batch).mean().backward()
    return grads(model)


@rows
@problems
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rho_zero_is_plain_training_bit_for_bit(row: Row, problem: Problem, dtype: torch.dtype) -> None:
    skip_exempt(row, problem.name)
    wanted = plain(problem, row, dtype)
    model, step = run(row, problem, dtype, **({} if row.rho is None else {"rho": 0.0}))
    assert grads(model).keys() == wanted.keys()
    assert all(torch.equal(g, wanted[n]) for n, g in grads(model).items())
    assert (step.forwards, step.backwards) == (1, 1) or row.rho is None


@rows
def test_a_radius_below_rounding_is_plain_training_through_all_the_passes(row: Row) -> None:
    """Unlike rho = 0, which is taken as a short cut, this one goes the whole way."""
    skip_exempt(row, "tiny-rho")
    if row.rho is None:
        pytest.skip("has no radius")
    wanted = plain(TRANSFORMER, row)
    model, step = run(row, TRANSFORMER, rho=1e-30)
    assert (step.forwards, step.backwards) == row.passes
    assert relative_error(grads(model), wanted) < 1e-12


@rows
def test_one_instance_makes_the_weighted_methods_sam(row: Row) -> None:
    skip_exempt(row, "one-instance")
    if row.rho is None or "no-bias-norm" in row.name:
        pytest.skip("perturbs something else")
    results = []
    for other in (row, next(r for r in ROWS if r.name == "sam")):
        model, batch, objective = TRANSFORMER.make(size=1)
        torch.manual_seed(3)
        other.method(rho=row.rho).backward(model, batch, row.wrap(objective))
        results.append(grads(model))
    assert relative_error(*results) < 1e-10


@rows
def test_permuting_the_batch_permutes_the_weights_and_nothing_else(row: Row) -> None:
    skip_exempt(row, "permutation")
    order = torch.tensor([3, 0, 4, 1, 2])
    model, (inputs, labels), objective = TRANSFORMER_NO_DROPOUT.make()
    step = row.method().backward(model, (inputs, labels), row.wrap(objective))
    other, _, _ = TRANSFORMER_NO_DROPOUT.make()
    permuted = row.method().backward(other, (inputs[order], labels[order]), row.wrap(objective))
    assert relative_error(grads(other), grads(model)) < 1e-6  # the second differences amplify rounding
    assert torch.allclose(permuted.losses, step.losses[order])
    if step.weights is not None and permuted.weights is not None:
        assert torch.allclose(permuted.weights, step.weights[order], rtol=1e-4)


@rows
@pytest.mark.parametrize("scale", [2.0**12, torch.tensor(2.0**12), torch.amp.GradScaler("cpu", init_scale=2.0**12)])
def test_scaling_the_loss_scales_the_gradient(row: Row, scale: Any) -> None:
    model, batch, objective = TRANSFORMER.make(torch.float32)
    torch.manual_seed(3)
    unscaled = row.method().backward(model, batch, row.wrap(objective))
    other, _, _ = TRANSFORMER.make(torch.float32)
    torch.manual_seed(3)
    step = row.method().backward(other, batch, row.wrap(objective), scale=scale)
    assert relative_error({n: g / 2.0**12 for n, g in grads(other).items()}, grads(model)) < 1e-6
    assert torch.allclose(step.losses, unscaled.losses)
    if step.grad_norm is not None:
        assert torch.allclose(step.grad_norm, unscaled.grad_norm, rtol=1e-5)


@rows
def test_gradients_accumulate_like_backward(row: Row) -> None:
    model, batch, objective = TRANSFORMER.make()
    torch.manual_seed(3)
    row.method().backward(model, batch, row.wrap(objective))
    first = grads(model)
    torch.manual_seed(3)
    row.method().backward(model, batch, row.wrap(objective))
    assert relative_error(grads(model), {n: 2 * g for n, g in first.items()}) < 1e-12


@rows
def test_micro_batches_equal_the_large_batch(row: Row) -> None:
    skip_exempt(row, "micro-batches")
    model, (inputs, labels), objective = TRANSFORMER_NO_DROPOUT.make(size=7)
    whole = row.method().backward(model, (inputs, labels), row.wrap(objective))
    other, _, _ = TRANSFORMER_NO_DROPOUT.make(size=7)
    parts = MicroBatches([(inputs[:2], labels[:2]), (inputs[2:5], labels[2:5]), (inputs[5:], labels[5:])])
    split = row.method().backward(other, parts, row.wrap(objective))
    assert relative_error(grads(other), grads(model)) < 1e-6
    assert torch.allclose(split.losses, whole.losses)


# -- 4. parameters of every kind ------------------------------------------------------------------------------------


@rows
def test_a_parameter_that_takes_part_in_one_pass_only_is_restored(row: Row) -> None:
    class Moody(nn.Module):
        """A mixture of experts that uses another expert in every pass."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.experts[self.calls % 2](x)

    torch.manual_seed(0)
    model = Moody().double()
    before = snapshot(model)
    row.method().backward(model, torch.randn(4, 3).double(), row.wrap(lambda m, x: m(x).square().sum(-1)))
    assert_intact(model, before)
    assert grads(model)


@rows
def test_sparse_embeddings(row: Row) -> None:
    if "directional" in row.name:
        pytest.skip("torch has no forward mode for sparse embeddings")
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 1)).double()
        before = snapshot(model)
        ids = torch.tensor([[1, 2], [2, 3], [5, 5]])
        row.method().backward(model, ids, row.wrap(lambda m, x: m(x).squeeze(-1).square()))
        assert_intact(model, before)
        results.append(grads(model))
    if row.name != "fisher-sam":  # ties among zero entries are broken in another order
        assert relative_error(results[1], results[0]) < 1e-6


@rows
def test_a_gradient_shared_by_two_parameters_is_not_used_twice_as_memory(row: Row) -> None:
    """Autograd hands one and the same tensor to both summands of a sum."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ (self.a + self.b)).square().sum(-1)

    torch.manual_seed(0)
    model = Sum().double()
    before = snapshot(model)
    x = torch.randn(4, 3).double()
    if "no-bias-norm" not in row.name:
        step = row.method().backward(model, x, row.wrap(lambda m, x: m(x)))
        assert_intact(model, before)
        assert torch.equal(model.a.grad, model.b.grad)
        assert step.skipped is None or not step.skipped


@rows
def test_a_parameter_without_gradient_gets_none(row: Row) -> None:
    model, _ = run(row, TRANSFORMER)
    assert model.frozen.weight.grad is None
    assert model.unused_head.weight.grad is None


# -- 5. what is not finite never reaches the weights ----------------------------------------------------------------


@rows
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0.0], ids=str)
def test_a_bad_perturbation_gradient_falls_back_to_the_plain_gradient(row: Row, bad: float) -> None:
    skip_exempt(row, "bad-gradient")
    skip_exempt(row, "first-backward-is-the-ascent")
    if row.rho is None or row.name in {"esam", "subset-sam"}:
        pytest.skip("perturbs nothing, or follows another batch")
    if "directional" in row.name:
        pytest.skip("a hook on the loss is not seen by forward mode")
    model, batch, objective = TRANSFORMER.make()
    before = snapshot(model)
    calls = 0

    def spoil(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad * bad if calls == 1 else grad  # the first backward is the ascent's

    def spoilt(model: nn.Module, batch: Any) -> Tensor:
        losses = objective(model, batch)
        if losses.requires_grad:
            losses.register_hook(spoil)
        return losses

    torch.manual_seed(3)
    method = row.method()
    step = method.backward(model, batch, row.wrap(spoilt))
    assert_intact(model, before)
    assert relative_error(grads(model), plain(TRANSFORMER, row)) < 1e-12
    assert bool(step.skipped)
    assert method.skipped == 1
    assert "plain gradient" in str(step.why_skipped)


@rows
def test_an_inf_in_the_data_leaves_the_weights_finite(row: Row) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    before = snapshot(model)
    x = torch.randn(4, 3)
    x[1, 1] = float("inf")
    row.method().backward(model, x, row.wrap(lambda m, x: m(x).squeeze(-1).square()))
    assert_intact(model, before)


# -- 6. bad input ---------------------------------------------------------------------------------------------------


BAD_OBJECTIVES = {
    "scalar": (lambda m, x: m(x).mean(), "scalar"),
    "column": (lambda m, x: m(x), r"\(\d, 1\)"),
    "integer": (lambda m, x: torch.arange(4), "int64"),
    "number": (lambda m, x: 1.0, "float"),
    "empty": (lambda m, x: m(x[:0]).squeeze(-1), "empty"),
    "detached": (lambda m, x: m(x).squeeze(-1).detach(), "trainable parameter"),
}


@rows
@pytest.mark.parametrize("kind", BAD_OBJECTIVES)
def test_a_bad_objective_gets_one_clear_error(row: Row, kind: str) -> None:
    skip_exempt(row, "bad-objective")
    objective, message = BAD_OBJECTIVES[kind]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError), match=message):
        row.method().backward(model, torch.randn(4, 3), row.wrap(objective))
    assert_intact(model, before)


@rows
def test_n_must_not_change_between_passes(row: Row) -> None:
    skip_exempt(row, "bad-objective")
    if row.passes[0] == 1:
        pytest.skip("one pass only")
    sizes = iter([4, 3, 4, 3, 4, 3, 4, 3])
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="expected"):
        row.method().backward(
            model, torch.randn(4, 3), row.wrap(lambda m, x: m(x[: next(sizes)]).squeeze(-1).square())
        )


@rows
def test_nothing_to_train(row: Row) -> None:
    model = nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        row.method().backward(model, torch.randn(4, 3), row.wrap(lambda m, x: m(x).squeeze(-1)))


@rows
def test_bad_hyperparameters(row: Row) -> None:
    skip_exempt(row, "rho-by-name")
    if row.rho is None:
        pytest.skip("has no radius")
    for bad in (-0.1, float("nan"), "0.05", True):
        with pytest.raises((ValueError, TypeError), match="rho"):
            row.method(rho=bad)
    with pytest.raises(ValueError, match="randomness"):
        row.method(randomness="sometimes")
    with pytest.raises(TypeError, match="no hyperparameter 'roh'"):
        row.method().replace(roh=0.1)


# -- 7. low precision -----------------------------------------------------------------------------------------------


@rows
def test_a_perturbation_inside_one_autocast_region_is_really_applied(row: Row) -> None:
    """Autocast keeps its casts of the weights; a stale one would make the second pass see w instead of w + eps."""
    if row.rho is None:
        pytest.skip("perturbs nothing")
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
    before = snapshot(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = objective(model, batch)  # fills the cache
        step = row.method(rho=0.5).backward(model, batch, row.wrap(objective))
        after = objective(model, batch)
    assert step.perturbed_losses is not None
    if step.losses.shape == step.perturbed_losses.shape:
        assert (step.perturbed_losses - step.losses).abs().max() > 0.05
    assert torch.equal(first, after)
    assert_intact(model, before)


@rows
def test_bf16_autocast_gradients_are_close_to_float32(row: Row) -> None:
    if row.name in {"esam", "delta-sam-random"}:
        pytest.skip("chooses or shuffles instances by rounded losses")
    results = []
    for enabled in (False, True):
        model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            row.method().backward(model, batch, row.wrap(objective))
        results.append(grads(model))
    assert relative_error(results[1], results[0]) < 0.1


# -- 8. passes as stated --------------------------------------------------------------------------------------------


@rows
def test_passes_are_counted_and_are_as_stated(row: Row) -> None:
    skip_exempt(row, "passes")
    model, batch, objective = TRANSFORMER.make()
    forwards = backwards = 0

    def forward(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    def backward(grad: Tensor) -> None:
        nonlocal backwards
        backwards += 1

    def counted(model: nn.Module, batch: Any) -> Tensor:
        losses = objective(model, batch)
        if losses.requires_grad:
            losses.register_hook(backward)
        return losses

    model.register_forward_hook(forward)
    step = row.method().backward(model, batch, row.wrap(counted))
    assert (forwards, backwards) == row.passes == (step.forwards, step.backwards)


@rows
def test_state_in_a_checkpoint_continues_exactly(row: Row) -> None:
    def train(model: nn.Module, method: Any, optimizer: Any, batch: Any, objective: Any, steps: int) -> None:
        for _ in range(steps):
            method.backward(model, batch, objective)
            optimizer.step()
            optimizer.zero_grad()

    model, batch, objective = TRANSFORMER.make()
    wrapped, method = row.wrap(objective), row.method()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    train(model, method, optimizer, batch, wrapped, 4)
    saved = {
        "model": {n: p.clone() for n, p in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "method": copy.deepcopy(method.state_dict()),
        "objective": copy.deepcopy(wrapped.state_dict()) if hasattr(wrapped, "state_dict") else None,
        "rng": torch.get_rng_state(),
    }
    train(model, method, optimizer, batch, wrapped, 3)

    other, _, _ = TRANSFORMER.make()
    wrapped, method = row.wrap(objective), row.method()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    method.load_state_dict(saved["method"])
    if saved["objective"] is not None:
        wrapped.load_state_dict(saved["objective"])
    torch.set_rng_state(saved["rng"])
    train(other, method, optimizer, batch, wrapped, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
