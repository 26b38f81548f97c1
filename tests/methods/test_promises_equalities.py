"""Promise 3: special cases that must coincide.

For all methods in ``helpers/rows.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltasam import MicroBatches
from helpers.problems import TRANSFORMER, TRANSFORMER_NO_DROPOUT, Problem, grads, relative_error
from helpers.promises import plain, problems, rows, run, skip_exempt
from helpers.rows import ROWS, Row


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
    """Unlike rho = 0, which takes a shortcut, this runs all passes."""
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
