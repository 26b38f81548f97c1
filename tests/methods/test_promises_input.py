"""Promise 6: bad input gets one clear error and leaves the weights intact.

All methods; one joins by a row in ``helpers/rows.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.promises import assert_intact, rows, skip_exempt, snapshot
from helpers.rows import Row

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
