"""Promises 4 and 5: parameters of every kind, and gradients that are not finite.

For all methods in ``helpers/rows.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import select
from helpers.problems import TRANSFORMER, grads, relative_error
from helpers.promises import assert_intact, plain, rows, run, skip_exempt, snapshot
from helpers.rows import Row


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
    """Autograd gives the same tensor to both summands of a sum."""
    skip_exempt(row, "parameters-without-layers")

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
        assert step.skipped is None or not step.skipped or "first-step-moves" in row.exempt


@rows
def test_a_parameter_without_gradient_gets_none(row: Row) -> None:
    model, _ = run(row, TRANSFORMER)
    assert model.frozen.weight.grad is None
    assert model.unused_head.weight.grad is None


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


def test_biases_of_recurrent_layers_and_attention_are_biases() -> None:
    layers = {
        "lstm": nn.LSTM(3, 2),
        "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "norm": nn.LayerNorm(4),
    }
    chosen = select(nn.ModuleDict(layers), "no-bias-norm")
    assert list(chosen) == [
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "attention.in_proj_weight", "attention.out_proj.weight",
    ]  # fmt: skip


class Adapted(nn.Module):
    """A table with another name, a tied head, and layers that only sound like a table or an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.embeddings_projection = nn.Linear(4, 4)
        self.explorator = nn.Linear(4, 4)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


def test_what_the_presets_choose() -> None:
    model = Adapted()
    rest = [f"{layer}.{what}" for layer in ("embeddings_projection", "explorator") for what in ("weight", "bias")]
    assert list(select(model, "no-embeddings")) == [*rest, "lora_A.weight"]
    assert list(select(model, "lora")) == ["lora_A.weight"]
    assert list(select(model)) == ["words.weight", *rest, "lora_A.weight"]
