"""What is changed in the compiler's graphs, and what is left alone. No GPU is needed to look at a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, scaled_dot_product_attention

from deltasam.compiling._attention import plain_attention, write_out_attention
from deltasam.compiling._gradients import keep_float32
from deltasam.compiling._merge import merge_layers

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default

has_products_in_float32 = pytest.mark.skipif(not hasattr(aten.mm, "dtype"), reason="torch 2.8 has them")


class Layers(nn.Module):
    """Three layers of one input, with different widths, and what is done between them."""

    def __init__(self, *, bias: bool = True, between: Callable[[Tensor], object] = lambda x: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, width, bias=bias) for width in (3, 5, 4))
        self.between = between

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * 1.0
        first = self.layers[0](x)
        self.between(x)
        return first, self.layers[1](x), self.layers[2](x).relu()


def traced(
    model: nn.Module, *inputs: Tensor, autocast: bool = True, change: Callable[[Graph], None]
) -> tuple[Any, int]:
    """The outputs of the model with its graph changed as the compiler changes it, and the layers in that graph."""
    counts = []

    def backend(module: GraphModule, _: list[Tensor]) -> GraphModule:
        change(module.graph)
        module.graph.lint()
        module.recompile()
        counts.append(sum(node.target is linear for node in module.graph.nodes))
        return module

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = torch.compile(model, backend=backend)(*inputs)
    return result, sum(counts)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_become_one_product(bias: bool) -> None:
    model, x = Layers(bias=bias), torch.randn(2, 7, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    found, products = traced(model, x, change=merge_layers)
    assert products == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)
        assert one.shape == other.shape


def test_gradients_of_merged_layers_are_those_of_each() -> None:
    model, x = Layers().double(), torch.randn(5, 6, dtype=torch.float64)
    gradients = []
    for change in (merge_layers, lambda graph: None):
        model.zero_grad()
        found, _ = traced(model, x, change=change)  # autocast leaves float64 alone: nothing is rounded
        sum((i + 1) * part.sin().sum() for i, part in enumerate(found)).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("reason", "model", "autocast", "products"),
    [
        ("without autocast the joint weight would be one more copy", Layers(), False, 3),
        ("the input changes in between", Layers(between=lambda x: x.add_(1.0)), True, 2),
        ("the input changes in between, by an assignment", Layers(between=lambda x: x.__setitem__(0, 0.0)), True, 2),
    ],
    ids=["no autocast", "in place", "assignment"],
)
def test_layers_that_are_not_merged(reason: str, model: nn.Module, autocast: bool, products: int) -> None:
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = model(x)
    found, count = traced(model, x, autocast=autocast, change=merge_layers)
    assert count == products, reason
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)


def test_a_weight_that_is_computed_is_not_merged() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(4, 6)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return linear(x, self.first), linear(x, self.second / self.second.norm())

    assert traced(Computed(), torch.randn(3, 6), change=merge_layers)[1] == 2


def gpu_graph(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Graph:
    """The graph of a function of tensors on a GPU, of which only the shapes exist."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)).graph


def targets(graph: Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@has_products_in_float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "gradient",
    [
        lambda d, a: cast(torch.mm(d.t(), a), torch.float32),
        lambda d, a: cast(torch.mm(a.t(), d).t(), torch.float32),
        lambda d, a: [
            aten.slice.Tensor(g, 0, i, i + 2) for g in [cast(torch.mm(d.t(), a), torch.float32)] for i in (0, 2)
        ],
    ],
    ids=["plain", "transposed", "in parts"],
)
def test_a_gradient_leaves_its_product_in_float32(gradient: Callable[..., Any], dtype: torch.dtype) -> None:
    graph = gpu_graph(gradient, (8, 4), (8, 3), dtype=dtype)
    keep_float32(graph)
    graph.lint()
    assert cast not in targets(graph)
    assert targets(graph).count(aten.mm.dtype) == 1
    for node in graph.nodes:
        if node.op == "output":
            assert all(value.meta["val"].dtype == torch.float32 for value in node.all_input_nodes)


@has_products_in_float32
@pytest.mark.parametrize(
    ("why", "function", "dtype"),
    [
        ("the cast is fused into the sum", lambda d, a: cast(torch.mm(d.t(), a), torch.float32) + 1, torch.bfloat16),
        (
            "the rounded one is read, too",
            lambda d, a: (cast(g := torch.mm(d.t(), a), torch.float32), g),
            torch.bfloat16,
        ),
        ("another precision is wanted", lambda d, a: cast(torch.mm(d.t(), a), torch.float64), torch.bfloat16),
        ("nothing is rounded", lambda d, a: torch.mm(d.t(), a), torch.float32),
    ],
    ids=["used inside", "used twice", "float64", "float32"],
)
def test_other_products_stay_as_they_are(why: str, function: Callable[..., Any], dtype: torch.dtype) -> None:
    graph = gpu_graph(function, (8, 4), (8, 3), dtype=dtype)
    before = targets(graph)
    keep_float32(graph)
    assert targets(graph) == before, why


def test_products_on_a_cpu_stay_as_they_are() -> None:
    tensors = [torch.randn(8, width, dtype=torch.bfloat16) for width in (4, 3)]
    graph = make_fx(lambda d, a: cast(torch.mm(d.t(), a), torch.float32))(*tensors).graph
    before = targets(graph)
    keep_float32(graph)
    assert targets(graph) == before


def attention_graph(dtype: torch.dtype, device: str) -> Graph:
    graph = Graph()
    query, key, value = (graph.placeholder(name) for name in "qkv")
    with FakeTensorMode():
        query.meta["example_value"] = torch.empty(2, 3, 5, 4, dtype=dtype, device=device)
    graph.output(graph.call_function(scaled_dot_product_attention, (query, key, value), {"dropout_p": 0.0}))
    return graph


@pytest.mark.parametrize(
    ("dtype", "device", "autocast", "written_out"),
    [
        (torch.float32, "cuda", False, True),
        (torch.float32, "cpu", False, False),
        (torch.bfloat16, "cuda", False, False),
        (torch.float32, "cuda", True, False),
    ],
)
def test_attention_is_written_out_in_float32_on_a_gpu(
    dtype: torch.dtype, device: str, autocast: bool, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast and kind == "cuda")
    graph = attention_graph(dtype, device)
    write_out_attention(graph)
    assert (plain_attention in targets(graph)) == written_out


def test_attention_written_out_is_attention() -> None:
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(
        plain_attention(query, key, value, is_causal=True),
        scaled_dot_product_attention(query, key, value, is_causal=True),
    )
