"""Promise 6: bad input gets one clear error and leaves the weights intact.

For all methods in ``helpers/rows.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from deltasam import ERM, ESAM, GSAM, SAM, Classification, DeltaSAM, Method, MicroBatches, SubsetSAM
from helpers.promises import assert_intact, rows, skip_exempt, snapshot
from helpers.rows import Row

BAD_OBJECTIVES = {
    "scalar": (lambda m, x: m(x).mean(), "scalar"),
    "column": (lambda m, x: m(x), r"\(\d, 1\)"),
    "integer": (lambda m, x: torch.arange(4), "int64"),
    "number": (lambda m, x: 1.0, "float"),
    "empty": (lambda m, x: m(x[:0]).squeeze(-1), "empty"),
    # a method that counts the instances itself raises the second message
    "mean": (lambda m, x: m(x).mean(0), r"\(1,\) for a batch of 4 instances, not \(4,\)|1 losses instead of 4"),
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


ONE_INSTANCE = {
    "a first dimension of 1": {"x": torch.ones(1, 3), "labels": torch.ones(1)},
    "one sequence": torch.ones(1, 3),
    "one sequence with its tags": (torch.ones(1, 3), torch.ones(1, 3)),
    "a sequence and its class": (torch.ones(3), torch.ones(1)),
    "sequences of different lengths": (torch.ones(3), torch.ones(2)),
    "one image and its class": (torch.ones(2, 3), torch.tensor(1)),
    "a bag": {"labels": torch.ones(1), "x": torch.ones(4, 3)},
    "a graph": (torch.ones(4, 3), torch.ones(2, 7)),
    "views": {"first": {"x": torch.ones(1, 3)}, "second": {"x": torch.ones(1, 3)}},
    "texts": ["one", "two"],
}


@pytest.mark.parametrize("method", [ERM(), SAM(), DeltaSAM(), GSAM()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("kind", ONE_INSTANCE)
def test_one_loss_is_right_for_one_instance_of_any_shape(method: Method, kind: str) -> None:
    step = method.backward(nn.Linear(3, 1), ONE_INSTANCE[kind], lambda m, batch: m(torch.ones(3)).square())
    assert step.losses.shape == (1,)


SEVERAL_INSTANCES = {
    "users, items and ratings": {"user": torch.arange(5), "item": torch.arange(5), "rating": torch.ones(5)},
    "numbers": torch.ones(5),
    "inputs and targets": [torch.ones(5), torch.ones(5)],
    "numbers and a matrix": (torch.ones(5), torch.ones(5, 2)),
}


@pytest.mark.parametrize("method", [ERM(), SAM(), DeltaSAM(), GSAM()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("kind", SEVERAL_INSTANCES)
def test_one_loss_is_wrong_for_several_instances(method: Method, kind: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"\(1,\) for a batch of 5 instances, not \(5,\).*a first dimension of 1"):
        method.backward(model, SEVERAL_INSTANCES[kind], lambda m, batch: m(torch.ones(3)).square())
    assert model.weight.grad is None


@pytest.mark.parametrize("method", [ERM(), SAM(), DeltaSAM()], ids=lambda method: type(method).__name__)
def test_the_loss_of_a_batch_that_cannot_be_taken_apart(method: Method) -> None:
    """``loss.expand(N)``, as the error for a scalar loss advises, treats the batch as one instance."""
    x, grads = torch.randn(4, 3), []
    for batch, size in ((x, 4), (x[None], 1)):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        method.backward(model, batch, lambda m, batch, size=size: m(batch).square().mean().expand(size))
        grads.append(model.weight.grad)
    assert torch.allclose(*grads)


@rows
def test_n_must_not_change_between_passes(row: Row) -> None:
    skip_exempt(row, "bad-objective")
    if row.passes[0] == 1:
        pytest.skip("one pass only")
    sizes = iter([4, 3, 4, 3, 4, 3, 4, 3])
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"losses instead of|must see the same batch"):
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
    with pytest.raises(TypeError, match="no hyperparameter roh="):
        row.method().replace(roh=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).squeeze(-1).square()


BAD_ARGUMENTS = {
    "optimizer": ({"model": adamw}, r"model=AdamW .*must be a torch\.nn\.Module.*backward\(model, batch, objective\)"),
    "loss": ({"objective": torch.tensor(1.0)}, r"objective=tensor\(1\.\) must be a callable objective\("),
    "class": ({"objective": Classification}, r"objective=Classification is a class: .*Classification\(\)"),
    "criterion": ({"objective": nn.CrossEntropyLoss()}, r"objective=CrossEntropyLoss\(\) takes outputs.*lambda model"),
    "function": ({"objective": nn.functional.cross_entropy}, r"cross_entropy.* takes outputs and targets"),
    "no scaler": ({"scale": None}, r"scale=None must be a number, a tensor with one element or a GradScaler"),
    "many scales": ({"scale": torch.ones(4)}, r"scale=tensor\(\[1\., 1\., 1\., 1\.\]\) must be"),
}


@rows
@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
def test_a_bad_argument_gets_one_clear_error(row: Row, kind: str) -> None:
    given, message = BAD_ARGUMENTS[kind]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    before = snapshot(model)
    arguments = {"model": model, "batch": torch.randn(4, 3), "objective": squares}
    arguments |= {name: value(model) if value is adamw else value for name, value in given.items()}
    with pytest.raises(TypeError, match=message) as caught:
        row.method().backward(**arguments)
    assert "\n" not in str(caught.value)
    assert_intact(model, before)


@rows
def test_an_objective_that_goes_backward_itself(row: Row) -> None:
    skip_exempt(row, "bad-objective")

    def backward_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        losses = squares(model, x)
        losses.mean().backward()
        return losses

    model = nn.Linear(3, 1)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"objective must only compute the losses.*backward\(\)"):
        row.method().backward(model, torch.randn(4, 3), row.wrap(backward_inside))
    assert_intact(model, before)


@rows
def test_bad_choices_raise_when_the_method_is_made(row: Row) -> None:
    with pytest.raises(
        ValueError, match=r"params='no-embedding' must be one of 'trained', .*'no-embeddings', .*predicate"
    ):
        row.method(params="no-embedding")
    with pytest.raises(ValueError, match=r"params=\[Parameter containing: tensor.*\.\.\. must be one of") as caught:
        row.method(params=list(nn.Linear(50, 50).parameters()))
    assert len(str(caught.value)) < 300


@rows
def test_counts_are_whole_numbers(row: Row) -> None:
    counts = {"k", "probe_every", "adv_steps", "refresh", "group", "seed"}
    for name in counts & {f.name for f in dataclasses.fields(row.method())}:
        for bad in (2.5, "2", True):
            with pytest.raises(ValueError, match=rf"{name}={bad!r} must be a .*whole number"):
                row.method(**{name: bad})


def test_numbers_of_other_packages_raise_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"rho=np\.float32\(.*\) must be a number in .*pass its \.item\(\)"):
        SAM(rho=np.float32(0.05))


@rows
def test_a_state_of_something_else(row: Row) -> None:
    method = row.method()
    with pytest.raises(TypeError, match=r"state=None must be"):
        method.load_state_dict(None)
    with pytest.raises(ValueError, match=r"state .*optimizer.*param_groups"):
        method.load_state_dict(adamw(nn.Linear(2, 2)).state_dict())


def test_a_learning_rate_without_a_range() -> None:
    with pytest.raises(ValueError, match=r"lr_max=0\.1 must be greater than lr_min=0\.1"):
        GSAM.rho_at(lr=0.1, lr_max=0.1, lr_min=0.1, rho_max=0.1, rho_min=0.01)


@rows
def test_a_scale_is_a_number_whatever_its_shape(row: Row) -> None:
    steps = []
    for scale in (torch.tensor(2.0), torch.tensor([2.0])):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        steps.append(row.method().backward(model, torch.randn(4, 3), row.wrap(squares), scale=scale))
    for name in ("losses", "grad_norm", "skipped"):
        first, second = (getattr(step, name) for step in steps)
        assert (first is None and second is None) or torch.equal(first, second), name


@pytest.mark.parametrize("method", [ESAM(), SubsetSAM()], ids=str)
def test_a_part_of_several_micro_batches(method: Method) -> None:
    with pytest.raises(ValueError, match=r"MicroBatches of 2.*backward\(\) for each.*scale=1 / 2"):
        method.backward(nn.Linear(3, 1), MicroBatches([torch.randn(4, 3), torch.randn(4, 3)]), squares)
