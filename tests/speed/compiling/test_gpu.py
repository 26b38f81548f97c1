"""Compiled models on a real GPU: the changed graphs run, and their gradients are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import SAM, Classification, PerInstanceSAM
from deltasam.speed.capture import Captured
from deltasam.speed.compiling import _passes, compiled
from deltasam.step.float32 import float32_kept

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).cuda().train()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(97, (8, 16), device="cuda")
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.arange(8).cuda() % 3}


def gradients(model: nn.Module, method: Any, callable_: Any, steps: int = 1, dtype: Any = None) -> dict[str, Tensor]:
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            method.backward(callable_, batch(), Classification())
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def far(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The distance of two gradients, relative to the norm of the second."""
    difference = sum(float((found[name] - exact[name]).double().square().sum()) for name in exact)
    return (difference / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The operations of every graph that leaves the passes."""
    seen: list[list[Any]] = []

    class Watched(_passes.AfterGradients):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            seen.append([node.target for node in graph.nodes if node.op == "call_function"])

        def uuid(self) -> None:
            return None  # nothing from the cache

    monkeypatch.setitem(_passes.PASSES, "post_grad_custom_post_pass", Watched())
    torch._dynamo.reset()
    return seen


def test_under_autocast_the_gradient_is_no_further_from_the_exact_one(graphs: list[list[Any]]) -> None:
    model = bert()
    exact = gradients(model, SAM(), model)
    eager = gradients(model, SAM(), model, dtype=torch.bfloat16)
    found = gradients(model, SAM(), compiled(model), dtype=torch.bfloat16)
    assert far(found, exact) < 1.2 * far(eager, exact) < 0.2
    assert all(g.dtype == torch.float32 for g in found.values())
    forward, backward = graphs[0], graphs[1]
    assert forward.count(aten.addmm.default) == 2 * 4 + 2  # query, key and value are one; pooler and head
    assert backward.count(aten.mm.dtype) == 2 * 4 + 2


def test_in_tf32_attention_is_written_out(graphs: list[list[Any]]) -> None:
    model = bert()
    exact = gradients(model, SAM(), model)
    with float32_kept():
        torch.set_float32_matmul_precision("high")
        found = gradients(model, SAM(), compiled(model))
    assert far(found, exact) < 0.02
    assert not any("scaled_dot_product" in str(target) for graph in graphs for target in graph)


def test_captured_and_compiled_equals_compiled() -> None:
    model = bert()
    torch._dynamo.reset()
    ready = compiled(model)
    plain = gradients(model, SAM(), ready, steps=2, dtype=torch.bfloat16)
    captured = Captured(SAM())
    found = gradients(model, captured, ready, steps=4, dtype=torch.bfloat16)
    assert captured.report.replayed > 0
    assert far(found, plain) < 0.02  # the perturbation is rounded with other random bits in every step


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["TF32", "bfloat16"])
@pytest.mark.parametrize("make", [compiled, torch.compile], ids=["tuned", "default"])
@pytest.mark.filterwarnings("error:the per-instance passes", "error:this step is not captured")
def test_per_instance_captured_and_compiled_equals_eager(make: Any, dtype: Any) -> None:
    model, method = bert(), PerInstanceSAM(rho=0.05)
    torch._dynamo.reset()
    exact = gradients(model, method, model)
    with float32_kept():
        torch.set_float32_matmul_precision("high")
        eager = gradients(model, method, model, dtype=dtype)
        ready = make(model)
        plain = gradients(model, method, ready, steps=2, dtype=dtype)
        captured = Captured(method)
        found = gradients(model, captured, ready, steps=4, dtype=dtype)
    assert captured.report.replayed > 0
    assert far(found, plain) < (0.02 if dtype else 1e-3)
    assert far(found, exact) < max(1.3 * far(eager, exact), 0.01)


@pytest.mark.filterwarnings("error:the per-instance passes", "error:this step is not captured")
def test_replayed_per_instance_passes_share_their_dropout_masks() -> None:
    model = bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    torch._dynamo.reset()
    captured, ready, found = Captured(PerInstanceSAM(rho=1e-6)), torch.compile(model), []
    data = batch()  # once: it sets the seed
    with float32_kept():
        torch.set_float32_matmul_precision("high")  # Inductor warns otherwise
        for _ in range(4):
            step = captured.backward(ready, data, Classification())
            torch.testing.assert_close(step.perturbed_losses, step.losses, rtol=1e-3, atol=1e-3)
            found.append(step.losses)
    assert captured.report.replayed > 1
    assert not torch.allclose(found[-1], found[-2])  # new masks in every step
