"""Compiled models: exact, compiled in both passes, compiled once per shape, and never silently uncompiled."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltasam.methods import ERM, PerInstanceSAM
from deltasam.objectives import Classification
from deltasam.per_instance import Ascent, record
from deltasam.per_instance.compiling.graph import TracedGraph
from deltasam.step.radius import Layerwise
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import gradient_errors, loop


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often graphs were recorded, perturbed and compiled, not counting comparisons."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = {"record": 0, "perturbed": 0, "_compiled": 0}

    def counted(name: str) -> Any:
        own = getattr(TracedGraph, name)

        def wrapper(self: TracedGraph, *args: Any, **kwargs: Any) -> Any:
            found = own(self, *args, **kwargs)
            counts[name] += not kwargs.get("interpreted", False)
            return found

        return wrapper

    for name in counts:
        monkeypatch.setattr(TracedGraph, name, counted(name))
    yield counts
    torch._dynamo.reset()


class Layers(nn.Module):
    """Every rule in a small model: tables, positions, layers with and without a bias, norms, a bare scale, a tie."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6, padding_idx=1), nn.Embedding(9, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm, self.root, self.scale = nn.LayerNorm(6), nn.RMSNorm(6), nn.Parameter(torch.rand(6))
        self.square, self.shift = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.dropout = dropout

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])[None]))
        h = F.dropout(h, self.dropout, self.training)
        h = self.root(h + self.down(F.gelu(self.up(h))))
        h = h + torch.addmm(self.shift, h.view(-1, 6), self.square).view(h.shape) * self.scale
        h = (F.dropout(h, self.dropout, self.training) * mask.unsqueeze(2)).sum(1)
        return F.linear(h, self.words.weight)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.manual_seed(1)
    tokens, mask, labels = batch
    return F.cross_entropy(model(tokens, mask), labels, reduction="none")


def batch_of(size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(2, 11, (size, length))
    mask = (torch.arange(length)[None] < 1 + torch.arange(size)[:, None] % length).double()
    return tokens.masked_fill(mask == 0, 1), mask, torch.arange(size) % 11


def error(model: nn.Module, call: Any, batch: Any, objective: Any = losses, rho: float = 0.1, group: int = 1) -> float:
    exact = loop(model, lambda: objective(model, batch), rho, group)
    model.zero_grad()
    PerInstanceSAM(rho=rho, group=group).backward(call, batch, objective)
    return gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient)


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "BERT", "RoBERTa", "GPT-2", "BERT, masked-LM head (tied)", "BERT with LoRA (peft)",
))])  # fmt: skip
@pytest.mark.filterwarnings("error:the per-instance passes")
def test_models_are_exact_and_run_compiled(name: str, runs: dict[str, int]) -> None:
    architecture = BY_NAME[name]
    model, run, batch = make(architecture, 3)
    exact = loop(model, run, 0.1)
    compiled = torch.compile(model, backend="aot_eager")

    def objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(1)
        return architecture.losses(model, batch)

    for _ in range(2):
        model.zero_grad()
        PerInstanceSAM(rho=0.1).backward(compiled, batch, objective)
        found = {n: p.grad for n, p in model.named_parameters() if n in exact.gradient}
        assert gradient_errors(found, exact.gradient) <= architecture.tolerance
    assert runs == {"record": 2, "perturbed": 2, "_compiled": 3}


@pytest.mark.parametrize("way", [pytest.param("torch.compile", marks=pytest.mark.slow), "module.compile"])
@pytest.mark.filterwarnings("error:the per-instance passes")
def test_one_compilation_per_shape_and_pass(way: str, runs: dict[str, int]) -> None:
    model = Layers().double().train()
    compiled: Any = torch.compile(model, backend="aot_eager") if way == "torch.compile" else model
    reference = Layers().double().train()
    reference.load_state_dict(model.state_dict())
    if way == "module.compile":
        model.compile(backend="aot_eager")
    for size, length in ((3, 5), (3, 5), (4, 7), (3, 5), (4, 7)):
        batch = batch_of(size, length)
        exact = loop(reference, lambda batch=batch: losses(reference, batch), 0.1)
        model.zero_grad()
        PerInstanceSAM(rho=0.1).backward(compiled, batch, losses)
        assert gradient_errors({n: p.grad for n, p in model.named_parameters()}, exact.gradient) <= 1e-9
    assert runs == {"record": 5, "perturbed": 5, "_compiled": 6}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the same trace for both passes


@pytest.mark.parametrize(("size", "length", "group"), [(1, 5, 1), (5, 5, 1), (5, 1, 1), (2, 4, 2), (5, 3, 2)])
@pytest.mark.filterwarnings("error:the per-instance passes")
def test_odd_shapes_and_groups(size: int, length: int, group: int, runs: dict[str, int]) -> None:
    model = Layers(dropout=0.0).double().train()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert error(model, compiled, batch_of(size, length), group=group) <= 1e-9
    assert runs["record"] == runs["perturbed"] == 2


@pytest.mark.filterwarnings("error:the per-instance passes")
def test_autocast(runs: dict[str, int]) -> None:
    model, batch = Layers().train(), batch_of(4, 6)
    batch = (batch[0], batch[1].float(), batch[2])
    gradients = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            PerInstanceSAM(rho=0.05).backward(call, batch, losses)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert runs["perturbed"] == 1
    assert gradient_errors(gradients[1], {n: g.double() for n, g in gradients[0].items()}) <= 0.05


@pytest.mark.filterwarnings("error:the per-instance passes")
def test_some_parameters_and_their_own_radii(runs: dict[str, int]) -> None:
    model, batch = Layers().double().train(), batch_of(4, 6)
    methods = (
        PerInstanceSAM(rho=0.1, params="no-bias-norm"),
        PerInstanceSAM(rho=0.1, params=lambda name, p: "up" in name or "norm" in name),
        PerInstanceSAM(rho=Layerwise(0.1)),
    )
    for method in methods:
        found = []
        for call in (model, torch.compile(model, backend="eager")):
            model.zero_grad()
            method.backward(call, batch, losses)
            found.append({name: p.grad for name, p in model.named_parameters()})
        assert gradient_errors(*found) <= 1e-9
    assert runs["perturbed"] == len(methods)


class Breaking(Layers):
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(tokens, mask)


class Unknown(Layers):
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return super().forward(tokens, mask) + torch.cdist(self.square, self.square).sum()


def twice(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) + losses(model, batch)


@pytest.mark.parametrize(
    ("kind", "objective", "reason"),
    [(Breaking, losses, "graph_break"), (Unknown, losses, r"cdist\(\)"), (Layers, twice, "several times")],
)
def test_what_is_not_covered_runs_uncompiled_with_one_warning(
    kind: type[nn.Module], objective: Any, reason: str, runs: dict[str, int]
) -> None:
    model = kind().double().train()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            assert error(model, compiled, batch_of(3, 5), objective) <= 1e-9
    told = [str(each.message) for each in found if "run uncompiled" in str(each.message)]
    assert len(told) == 1
    assert runs["perturbed"] == 0
    with pytest.warns(match=reason):
        warnings.warn(told[0], stacklevel=1)


def test_parts_that_are_compiled_run_uncompiled_with_a_warning() -> None:
    model = Layers().double().train()
    model.up.compile(backend="eager")
    with pytest.warns(UserWarning, match="compile the whole model"):
        PerInstanceSAM(rho=0.1).backward(model, batch_of(3, 5), losses)


def test_a_perturbed_pass_without_gradients_is_exact() -> None:
    """It has another graph than the recording, which was not compared."""
    model, batch = Layers().double().train(), batch_of(3, 5)
    values = []
    for call in (model, torch.compile(model, backend="eager")):
        found = record(call, lambda call=call: losses(call, batch))
        ascent = Ascent(found.slots, found.losses, found.norms, [(found.gradients, 0.1 / found.norms)])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ascent.perturbed():
                values.append(losses(call, batch))
    torch.testing.assert_close(*values, rtol=1e-10, atol=0)


def test_a_compiler_that_fails_on_the_perturbed_pass(runs: dict[str, int]) -> None:
    def backend(module: Any, inputs: list[Any]) -> Any:
        if any("perturbed" in str(node.target) for node in module.graph.nodes):
            raise OSError("no space left")
        return module.forward

    model = Layers().double().train()
    compiled = torch.compile(model, backend=backend)
    with pytest.warns(UserWarning, match="run uncompiled: OSError: no space left"):
        assert error(model, compiled, batch_of(3, 5)) <= 1e-9
    assert error(model, compiled, batch_of(3, 5)) <= 1e-9  # without another warning
    assert runs["perturbed"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modes_that_record_cuda_graphs_are_refused() -> None:
    model = Layers().double().train()
    with pytest.warns(UserWarning, match="use the default one, and Captured"):
        assert error(model, torch.compile(model, mode="reduce-overhead"), batch_of(3, 5)) <= 1e-9


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_models_are_freed(way: str) -> None:
    model = Layers().double()
    compiled: Any = torch.compile(model, backend="eager") if way == "torch.compile" else model
    if way == "module.compile":
        model.compile(backend="eager")
    PerInstanceSAM(rho=0.1).backward(compiled, batch_of(3, 5), losses)
    gone = weakref.ref(model)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_passes_draw_the_masks_of_the_compiled_model(runs: dict[str, int]) -> None:
    """Inductor draws its own random numbers: not those of eager dropout, but the same in all graphs of a model."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.dropout(F.gelu(self.first(F.dropout(x, 0.5))), 0.5))

    model = Dropped()
    compiled = torch.compile(model)
    batch = (torch.randn(16, 6), torch.arange(16) % 3)
    found = []
    for method in (ERM(), PerInstanceSAM(rho=1e-7), PerInstanceSAM(rho=1e-7)):
        model.zero_grad()
        torch.manual_seed(3)
        step = method.backward(compiled, batch, Classification())
        found.append((step.losses, {name: p.grad for name, p in model.named_parameters()}))
    assert runs["perturbed"] == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.perturbed_losses, step.losses, rtol=1e-4, atol=1e-5)
