"""Changes to the graphs of the compiler, and graphs that are not changed. No GPU is needed to inspect a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, relu, scaled_dot_product_attention
from torch.testing._internal.two_tensor import TwoTensor

from deltasam.speed.compiling._attention import plain_attention, write_out_attention
from deltasam.speed.compiling._gradients import compiler_knows, keep_float32
from deltasam.speed.compiling._merge import merge_layers

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default

has_products_in_float32 = pytest.mark.skipif(not compiler_knows(), reason="products with float32 results: torch 2.9")


def merged(model: Callable[..., Any], *inputs: Any, autocast: bool = True) -> tuple[Any, int]:
    """The outputs of a model with merged layers, and the number of layers that are left."""
    counts = []

    def backend(module: GraphModule, examples: list[Tensor]) -> Any:
        merge_layers(module.graph)
        module.graph.lint()
        module.recompile()
        counts.append(sum(node.target is linear for node in module.graph.nodes))
        return aot_eager(module, examples)

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = torch.compile(model, backend=backend)(*inputs)
    return result, sum(counts)


def layers(*widths: int, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=bias) for width in widths]


def check(model: Callable[..., Any], *, left: int, autocast: bool = True, dtype: torch.dtype = torch.float32) -> None:
    """Checks that the merged model has the same outputs, and this number of layers."""
    torch.manual_seed(1)
    x = torch.randn(5, 6, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = model(x.clone())
    found, count = merged(model, x.clone(), autocast=autocast)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert count == left


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_become_one_product(bias: bool) -> None:
    a, b, c = layers(3, 5, 4, bias=bias)
    check(lambda x: (a(x).unsqueeze(1).sin(), b(x).tanh(), c(x).view(-1, 2).view(-1).relu()), left=1)


def test_gradients_of_merged_layers_are_those_of_each() -> None:
    a, b = (layer.double() for layer in layers(3, 4))
    x = torch.randn(5, 6, dtype=torch.float64)  # autocast does not cast float64: nothing is rounded

    def model(x: Tensor) -> Tensor:
        return a(x).sin().sum() + 2 * b(x).sin().sum()

    gradients = []
    for one in (model, lambda x: merged(model, x)):
        for layer in (a, b):
            layer.zero_grad()
        found = one(x)
        if isinstance(found, tuple):
            assert found[1] == 1
            found = found[0]
        found.backward()
        gradients.append([p.grad for layer in (a, b) for p in layer.parameters()])
    torch.testing.assert_close(*gradients)


def iadd(x: Tensor) -> None:
    alias = x
    alias += 1


def of_a_view(x: Tensor) -> None:
    flat = x.view(-1)
    flat *= 3


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "method": lambda x: x.add_(1.0),
    "assignment": lambda x: x.__setitem__(0, 0.0),
    "operator": iadd,
    "of a view": of_a_view,
    "keyword": lambda x: relu(x, inplace=True),
    "argument": lambda x: relu(x, True),
    "module": nn.ReLU(inplace=True),
    "operation": lambda x: torch.ops.aten.add_.Tensor(x, 1),
    "dunder": lambda x: x.__iadd__(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "dropout": lambda x: torch.nn.functional.dropout(x, 1.0, True, True),
}


@pytest.mark.parametrize("between", IN_PLACE.values(), ids=IN_PLACE)
def test_layers_are_not_merged_if_their_input_changes_in_between(between: Callable[[Tensor], object]) -> None:
    a, b, c = layers(3, 4, 5)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        x = x * 1.0
        first = a(x).sin()
        between(x)
        return first, b(x).sin(), c(x).sin()

    check(model, left=2)


def scaled(q: Tensor) -> Tensor:
    q *= 0.5
    return q.sin()


def alias_scaled(q: Tensor) -> Tensor:
    q.contiguous().mul_(0.5)
    return q.sin()


WANTED_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "handed out": lambda q: q,
    "a view handed out": lambda q: q.view(-1),
    "written to": scaled,
    "written to by way of what may be a copy": alias_scaled,
    "strides": lambda q: torch.as_strided(q, (2, 2), q.stride()).sin(),
    "activation in place": lambda q: relu(q, inplace=True).sin(),
}


@pytest.mark.parametrize("use", WANTED_WHOLE.values(), ids=WANTED_WHOLE)
def test_a_result_that_cannot_be_a_slice_is_not_merged(use: Callable[[Tensor], Tensor]) -> None:
    a, b, c = layers(4, 4, 4)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = a(x), b(x), c(x)
        return use(q), k.sin(), v.sin()

    check(model, left=2)


def test_without_autocast_nothing_is_merged() -> None:
    a, b = layers(3, 4)
    check(lambda x: (a(x).sin(), b(x).sin()), left=2, autocast=False)


def test_weights_that_autocast_does_not_copy_are_not_merged() -> None:
    a, b = (layer.to(torch.bfloat16) for layer in layers(3, 4))
    check(lambda x: (a(x).sin(), b(x).sin()), left=2, dtype=torch.bfloat16)


def test_a_model_that_switches_autocast_is_not_changed() -> None:
    a, b, c, d = layers(3, 4, 3, 4)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            inside = a(x).sin(), b(x).sin()
        return *inside, c(x).sin(), d(x).sin()

    check(model, left=4)


def test_layers_on_both_sides_of_no_grad_are_not_merged() -> None:
    a, b, c = layers(3, 4, 5)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        first = a(x).sin()
        with torch.no_grad():
            second = b(x).sin()
        return first, second, c(x).sin()

    check(model, left=3)


def test_a_frozen_layer_is_not_merged_with_a_trainable_one() -> None:
    a, b, c = layers(3, 4, 5)
    b.requires_grad_(False)
    check(lambda x: (a(x).sin(), b(x).sin(), c(x).sin()), left=2)


def test_layers_that_cannot_be_joined() -> None:
    with_bias, without = layers(3)[0], layers(4, bias=False)[0]
    check(lambda x: (with_bias(x).sin(), without(x).sin()), left=2)
    narrow = layers(5)[0].half()
    check(lambda x: (with_bias(x).sin(), narrow(x).sin()), left=2)
    weight, row, one = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(1))
    check(lambda x: (linear(x, row).sin(), linear(x, row * 1.0).sin(), linear(x, row).cos()), left=3)
    check(lambda x: (linear(x, weight, one).sin(), linear(x, weight, one).cos()), left=2)
    check(lambda x: (linear(x, weight=weight).sin(), linear(x, weight=weight).cos()), left=2)
    check(lambda x: (linear(x, weight).sin(), linear(x, weight / weight.norm()).sin()), left=2)


def test_quantised_and_sharded_weights_are_not_joined() -> None:
    a, b = layers(3, 4, bias=False)
    for layer in (a, b):  # represents both: tensors made of others, which may not support torch.cat
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
    assert merged(lambda x: (a(x).sin(), b(x).sin()), torch.randn(5, 6))[1] == 2


def test_parts_keep_their_metadata() -> None:
    a, b = layers(3, 4)
    seen: list[Any] = []

    def backend(module: GraphModule, _: list[Tensor]) -> GraphModule:
        merge_layers(module.graph)
        seen.extend(node.meta["example_value"].shape for node in module.graph.nodes if node.target is operator.getitem)
        return module

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(lambda x: (a(x).sin(), b(x).sin()), backend=backend)(torch.randn(5, 6))
    assert seen == [(5, 3), (5, 4)]


def gpu_graph(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Graph:
    """The graph of a function of fake tensors on a GPU, which have shapes but no values."""
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
def test_the_product_of_a_gradient_returns_float32(gradient: Callable[..., Any], dtype: torch.dtype) -> None:
    graph = gpu_graph(gradient, (8, 4), (8, 3), dtype=dtype)
    keep_float32(graph)
    graph.lint()
    assert cast not in targets(graph)
    assert targets(graph).count(aten.mm.dtype) == 1
    for node in graph.nodes:
        if node.op == "output":
            values = [value.meta["val"] for value in node.all_input_nodes]
            assert all(value.dtype == torch.float32 for value in values)
            assert all(value.stride() in ((3, 1), (1, 4)) for value in values)


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
        (
            "two casts are two tensors",
            lambda d, a: (cast(g := torch.mm(d.t(), a), torch.float32), cast(g.t(), torch.float32)),
            torch.bfloat16,
        ),
        (
            "the cast of a part is dense",
            lambda d, a: cast(aten.slice.Tensor(torch.mm(d.t(), a), 1, 0, 2), torch.float32),
            torch.bfloat16,
        ),
    ],
    ids=["used inside", "used twice", "float64", "float32", "cast twice", "cast of a part"],
)
def test_other_products_are_not_changed(why: str, function: Callable[..., Any], dtype: torch.dtype) -> None:
    graph = gpu_graph(function, (8, 4), (8, 3), dtype=dtype)
    before = targets(graph)
    keep_float32(graph)
    assert targets(graph) == before, why


def test_products_on_a_cpu_are_not_changed() -> None:
    tensors = [torch.randn(8, width, dtype=torch.bfloat16) for width in (4, 3)]
    graph = make_fx(lambda d, a: cast(torch.mm(d.t(), a), torch.float32))(*tensors).graph
    before = targets(graph)
    keep_float32(graph)
    assert targets(graph) == before


def attention_graph(dtype: torch.dtype, device: str, length: int = 5) -> Graph:
    graph = Graph()
    query, key, value = (graph.placeholder(name) for name in "qkv")
    with FakeTensorMode():
        query.meta["example_value"] = torch.empty(2, 3, 5, 4, dtype=dtype, device=device)
        key.meta["example_value"] = torch.empty(2, 3, length, 4, dtype=dtype, device=device)
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


@pytest.mark.parametrize(("length", "written_out"), [(512, True), (513, False)])
def test_attention_to_many_tokens_stays_fused(length: int, written_out: bool) -> None:
    graph = attention_graph(torch.float32, "cuda", length)
    write_out_attention(graph)
    assert (plain_attention in targets(graph)) == written_out


def test_attention_written_out_equals_attention() -> None:
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    torch.testing.assert_close(
        plain_attention(query, key, value, is_causal=True),
        scaled_dot_product_attention(query, key, value, is_causal=True),
    )
    fused, written_out = (
        [str(target) for target in targets(make_fx(attention)(query, key, value).graph)]
        for attention in (scaled_dot_product_attention, plain_attention)
    )
    assert any("scaled_dot_product" in name for name in fused)
    assert not any("scaled_dot_product" in name for name in written_out)
