"""Private names of torch are used only in ``deltasam/_torch.py``, each with a fallback or one clear error."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deltasam._torch

PLACE = Path(deltasam._torch.__file__)
FILES = sorted(path for path in PLACE.parent.rglob("*.py") if path != PLACE)
#: Private attributes of Python, NumPy and the frameworks of the integrations.
OTHERS = {"_exit", "_fields", "_getframe", "_inst", "_metrics", "_prepare_inputs", "_rand", "_replace"}
OTHERS |= {"_original_forward", "_strategy", "_steps", "_trainer"}  # as text, for getattr()


def is_private(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"_[a-zA-Z]\w*", name))


def attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Returns the private attributes that are read, except those of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "other")):
                yield node


def texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """Returns private names in strings, as in ``getattr(model, "_orig_mod")``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and is_private(node.value))


def own_names() -> set[str]:
    """Returns the private attributes, methods and modules of deltasam."""
    found = {path.stem for path in FILES}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def torch_names() -> set[str]:
    """Returns the private names that ``_torch.py`` uses."""
    tree = ast.parse(PLACE.read_text("utf-8"))
    return {node.attr for node in attributes(tree)} | {str(node.value) for node in texts(tree)}


OWN, TORCH = own_names(), torch_names()


def used_in(path: Path) -> Iterator[str]:
    """Yields the private names of torch in a file."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from filter(is_private, [*str(node.module).split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if re.match(r"torch(\.\w+)*\._", alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and is_private(name) and name not in OWN | OTHERS:
                yield name
    yield from (str(text.value) for text in texts(tree) if text.value in TORCH)
    yield from (node.attr for node in attributes(tree) if node.attr in TORCH or node.attr not in OWN | OTHERS)


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {str(path): names for path in FILES if (names := sorted(set(used_in(path))))}
    assert not found, f"move these to deltasam/_torch.py: {found}"


def test_the_search_finds_private_names() -> None:
    assert {"_version", "_parameters", "_get_fsdp_state", "_orig_mod", "_C"} <= TORCH
    assert not TORCH & OTHERS
    assert {"_C", "_fsdp_param_group", "_inductor", "_orig_mod", "_pytree"} <= set(used_in(PLACE))


def loaded(monkeypatch: pytest.MonkeyPatch, *missing: tuple[object, str]) -> Any:
    """Imports ``_torch.py`` with a torch that lacks these names."""
    for owner, name in missing:
        monkeypatch.delattr(owner, name, raising=False)
    spec = importlib.util.spec_from_file_location("_torch_without", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "name", ["foreach_add", "foreach_copy_", "foreach_lerp", "foreach_lerp_", "foreach_mul_", "foreach_norm"]
)
def test_a_missing_kernel_is_an_error_at_first_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = loaded(monkeypatch, (torch, f"_{name}"))
    with clear_error(f"torch._{name}"):
        getattr(names, name)([torch.ones(1)], [torch.ones(1)], 2.0)


@pytest.mark.parametrize("without", [False, True])
def test_copies_of_many_tensors(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = loaded(monkeypatch, (torch, "_foreach_clone")) if without else deltasam._torch
    values = [torch.randn(2, 3, requires_grad=True), torch.randn(4, 2).T, torch.tensor([-0.0, float("nan")])]
    made = names.foreach_clone(values)
    for copy, value in zip(made, values, strict=True):
        assert copy.data_ptr() != value.data_ptr()
        assert (copy.stride(), copy.requires_grad) == (value.stride(), False)
        assert torch.equal(copy.view(torch.int32), value.detach().view(torch.int32))


@pytest.mark.parametrize(("step", "expected"), [(0.5, [3.5, 5.0]), (0.0, [1.0, 2.0])])
def test_the_fused_ascent(step: float, expected: list[float]) -> None:
    weights, direction = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0 if step else float("inf")])
    deltasam._torch.fused_ascent_([weights], [direction], torch.tensor(step))
    assert weights.tolist() == expected


def test_answers_are_cautious_where_names_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    functorch, ddp = torch._C._functorch, nn.parallel.DistributedDataParallel
    names = loaded(
        monkeypatch,
        (functorch, "maybe_current_level"),
        (nn.modules.batchnorm, "_BatchNorm"),
        (nn.modules.conv, "_ConvNd"),
        (torch._C, "_get_fp32_precision_getter"),
        (ddp, "_active_ddp_module"),
    )
    assert names.in_function_transform()
    assert isinstance(nn.BatchNorm2d(3), names.BATCH_NORM)
    assert isinstance(nn.Conv2d(1, 1, 1), names.CONVOLUTION)
    assert not names.HAS_FP32_PRECISION
    assert names.active_ddp() is None
    bare: Any = SimpleNamespace()
    assert names.is_view(bare)
    assert names.with_gradient_hooks({"w": bare}) == {"w": bare}
    assert names.base_of(bare) is names.output_dtype(bare) is names.fsdp_gathers_as(bare) is None
    assert names.argument_names(bare) == []
    assert names.indices_of(bare) is None
    assert (names.dimension_of(bare), names.shape_before(bare)) == (0, ())
    assert not names.joins_uneven_inputs(bare)


def test_the_names_of_this_torch() -> None:
    names, linear = deltasam._torch, nn.Linear(2, 3)
    x = torch.ones(4, 2)
    before = names.version_of(x)
    x.add_(1)
    assert names.version_of(x) > before
    assert names.is_view(x[0])
    assert not names.is_view(x)
    assert names.base_of(x[0]) is x
    assert not names.with_gradient_hooks({"w": linear.weight})
    linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert list(names.with_gradient_hooks({"w": linear.weight, "b": linear.bias})) == ["w"]
    assert names.output_dtype(linear(x).bfloat16().grad_fn) is torch.bfloat16
    rows, h = torch.tensor([1, 0]), torch.ones(4, 2, requires_grad=True)
    (index,) = names.indices_of(h[rows].grad_fn)
    assert torch.equal(index, rows)
    assert names.shape_before(h[rows].grad_fn) == (4, 2)
    places = {dim: names.dimension_of(h.index_select(dim, rows).grad_fn) for dim in (0, 1, -1, -2)}
    assert places == {0: 0, 1: 1, -1: 1, -2: 0}
    assert list(names.parameters_of(linear)) == ["weight", "bias"]
    assert names.parameters_in(vars(linear)) is names.parameters_of(linear)
    assert names.children_in(vars(linear)) is names.children_of(linear)
    assert names.buffers_in(vars(linear)) is names.buffers_of(linear)
    assert list(names.buffers_of(nn.BatchNorm1d(2))) == ["running_mean", "running_var", "num_batches_tracked"]
    assert not names.forward_pre_hooks_of(linear)
    assert isinstance(nn.BatchNorm1d(2), names.BATCH_NORM)
    assert names.argument_names(torch.ops.aten.mm.default) == ["self", "mat2"]
    assert not names.in_function_transform()
    assert torch.func.vmap(lambda row: row * names.in_function_transform())(torch.ones(2)).tolist() == [1, 1]
    compiled = torch.compile(linear)
    assert names.uncompiled(compiled) is linear
    assert names.uncompiled(linear) is linear
    assert names.any_compiled([linear, compiled])
    assert not names.any_compiled([linear])
    assert names.compiled_call(linear) is None
    for each, name in ((compiled, "forward"), (linear, "_compiled_call_impl")):
        linear.compile(mode="reduce-overhead")
        call = names.compiled_call(each)
        assert call is not None
        assert (call.name, call.inner) == (name, linear)
        assert names.replays_graphs(call.backend) == (each is linear)


def clear_error(name: str) -> Any:
    message = rf"torch {re.escape(torch.__version__)} has no .*{re.escape(name)}.* install a version of torch"
    return pytest.raises(RuntimeError, match=message)


def test_a_missing_attribute_is_an_error_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = loaded(monkeypatch)
    read = names._attribute(nn.Module, "_slots_of_another_version", "a test")
    with clear_error("_slots_of_another_version"):
        read(nn.Module())


def test_missing_overrides_are_errors_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch, "torch.utils._python_dispatch")
    without_module(monkeypatch, "torch.utils._pytree")
    names = loaded(monkeypatch, (torch._C, "DisableTorchFunctionSubclass"))
    with clear_error("DisableTorchFunctionSubclass"):
        names.no_torch_function()
    with clear_error("TorchDispatchMode"):
        type("Mode", (names.TorchDispatchMode,), {})()
    with clear_error("_pytree"):
        names.tree_flatten(())
    assert names.is_wrapper_subclass(torch.ones(1).as_subclass(type("Wrapped", (torch.Tensor,), {})))
    assert not names.is_wrapper_subclass(nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("call", "module"),
    [("inductor_settings", "torch._inductor"), ("inductor_pass", "torch._inductor.custom_graph_pass")],
)
def test_a_missing_compiler_is_an_error(call: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch, module)
    with clear_error(module):
        getattr(deltasam._torch, call)()


def test_missing_products_of_the_compiler_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch, "torch._inductor.kernel.mm")
    assert not deltasam._torch.inductor_multiplies_to_float32()


def test_the_checkpoint_function_is_restored() -> None:
    from torch.utils import checkpoint

    former = "_checkpoint_without_reentrant_generator"
    name = next(
        each for each in (f"{former}_impl", former) if hasattr(checkpoint, each)
    )  # since torch 2.14, and before
    own = getattr(checkpoint, name)
    with deltasam._torch.recomputed_by(lambda compute: compute()):
        assert getattr(checkpoint, name) is not own
    assert getattr(checkpoint, name) is own


def test_each_thread_recomputes_in_its_own_way() -> None:
    """The second thread enters the context before the first leaves it, and leaves it later."""
    from torch.utils import checkpoint

    before, made = dict(vars(checkpoint)), list[str]()
    opened, closed = threading.Event(), threading.Event()

    def way(name: str) -> Callable[[Callable[[], Any]], Any]:
        return lambda compute: (made.append(name), compute())[1]

    def train() -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()

    def second() -> None:
        with deltasam._torch.recomputed_by(way("second")):
            opened.set()
            closed.wait(10)
            train()

    thread = threading.Thread(target=second)
    with deltasam._torch.recomputed_by(way("first")):
        thread.start()
        opened.wait(10)
        train()
    closed.set()
    thread.join()
    train()
    assert made == ["first", "second"]
    assert dict(vars(checkpoint)) == before


def test_the_newer_name_of_the_checkpoint_function_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import checkpoint

    called = []
    newer = "_checkpoint_without_reentrant_generator_impl"
    monkeypatch.setattr(checkpoint, newer, lambda function, *rest: called.append(function(*rest)), raising=False)
    with deltasam._torch.recomputed_by(lambda compute: -compute()):
        getattr(checkpoint, newer)(lambda x: x, 3)
    assert called == [-3]


@pytest.mark.parametrize(
    "module",
    [
        SimpleNamespace(),
        SimpleNamespace(_get_fsdp_state=SimpleNamespace),
        SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace()])),
    ],
    ids=["no state", "no groups", "other groups"],
)
def test_sharded_parameters_kept_elsewhere_are_an_error(module: ModuleType) -> None:
    with clear_error("scope='global'"):
        deltasam._torch.fsdp_parameter_groups(module)
