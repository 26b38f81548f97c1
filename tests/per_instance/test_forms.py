"""Every form of a layer's gradients is exact: low rank, written out with one matrix per group, and mixtures."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deltasam import Layerwise, PerInstanceSAM, Relative
from deltasam.per_instance import instance_adversarial_losses, record
from deltasam.per_instance import recording as _recording
from deltasam.per_instance.algebra import gradient as _gradient
from deltasam.per_instance.algebra import perturbation as _perturbation
from deltasam.per_instance.algebra.factors import Dense, LowRank
from deltasam.step.fused import instances
from helpers.architectures import BY_NAME, make
from helpers.frozen import FAMILIES, adapted, base_names, reference, run_of, trained_gradients
from helpers.instance_reference import ascended, gradient_errors, groups_of, loop, relative

FORMS: dict[str, Any] = {
    "low-rank": lambda layers: ["low-rank"] * len(layers),
    "written": lambda layers: ["written"] * len(layers),
    "alternating": lambda layers: [("low-rank", "written")[k % 2] for k in range(len(layers))],
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All layers take this form, whatever it costs."""
    monkeypatch.setattr(_gradient, "choose", lambda layers, on, most=None: FORMS[request.param](layers))
    return request.param


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gradient, "choose", lambda layers, on, most=None: FORMS["written"](layers))


# Two layers of biases; Conv1D, tied; tables and heads that share a weight; layers used many times; patches; adapters.
NAMES = ["BERT", "GPT-2", "BERT, masked-LM head (tied)", "T5", "ALBERT", "DeBERTa-v2", "ResNet with GroupNorm",
         "nn.TransformerEncoder", "BERT with LoRA (peft)", "MLP"]  # fmt: skip


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_loop(name: str, group: int, form: str) -> None:
    architecture = BY_NAME[name]
    model, run, batch = make(architecture, 5)
    exact = loop(model, run, 0.1, group)
    step = PerInstanceSAM(rho=0.1, group=group, engine="low-rank").backward(
        model, batch, lambda model, batch: _seeded(architecture.losses, model, batch)
    )
    assert relative(step.losses, exact.losses) <= architecture.tolerance
    assert relative(step.perturbed_losses, exact.perturbed) <= architecture.tolerance
    found = {name: p.grad for name, p in model.named_parameters()}
    assert gradient_errors(found, exact.gradient) <= architecture.tolerance


def _seeded(losses: Any, model: nn.Module, batch: Any) -> Tensor:
    torch.manual_seed(1)  # as make() does in every pass
    return losses(model, batch)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_gradients_serve_several_passes_unless_they_are_given_away(name: str, form: str) -> None:
    architecture = BY_NAME[name]
    model, run, _ = make(architecture, 3)
    recording = record(model, run)
    c = 0.1 / recording.norms
    values = []
    for sign in (1, -1, 1):
        with recording.perturbed(sign * c):
            values.append(run().detach())
    last = recording.for_one_pass()
    with last.perturbed(c):
        values += [run().detach(), run().detach()]  # two forwards in one pass, as with checkpointing
    assert relative(values[0], values[1]) > 1e-3
    for other in values[2:]:
        assert torch.equal(other, values[0])
    written = [f for found in last.gradients.factors.values() for f in found if isinstance(f, Dense) and f.once]
    assert bool(written) == (form != "low-rank")
    for factor in written:
        with pytest.raises(AttributeError):
            factor.dense()


@pytest.mark.parametrize("group", [1, 3])
def test_several_ascent_steps(group: int, form: str) -> None:
    model, run, _ = make(BY_NAME["BERT"], 3)
    found = instance_adversarial_losses(
        model, {}, lambda model, batch: run(), rho=0.1, steps=3, group=group, engine="low-rank"
    )
    for members in groups_of(3, group):
        wanted = ascended(model, run, 0.1, 3, 2 * 0.1 / 3, members)
        assert relative(found[members].detach(), wanted) < 1e-9


@pytest.mark.parametrize("rho", [Layerwise(0.05), Relative(0.01)], ids=repr)
def test_separate_radii(rho: Any, form: str) -> None:
    """Weights and biases are scaled by numbers of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(4, 6, 5).double()
    results = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        step = PerInstanceSAM(rho=rho, engine=engine).backward(model, x, lambda m, x: m(x).square().sum((1, 2)))
        results.append((step.perturbed_losses, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for mine, exact in zip(*results, strict=True):
        assert relative(mine, exact) < 1e-9


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT"])
@pytest.mark.parametrize("group", [1, 3])
def test_frozen_weights_under_adapters(family: str, group: int, form: str) -> None:
    model = adapted(family)
    run, batch, _ = run_of(family, 3)
    exact = reference(model, run, base_names(model), 0.1, group)
    step = PerInstanceSAM(rho=0.1, params="base", group=group).backward(model, batch, lambda m, b: run(m))
    tolerance = FAMILIES[family].tolerance
    assert relative(step.perturbed_losses, exact.perturbed) <= tolerance
    assert gradient_errors(trained_gradients(model), exact.gradient) <= tolerance


class Odd(nn.Module):
    """A weight used as it is, transposed, and in an operation that has no rule; a bias of two layers; odd sizes."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 9)
        self.weight = nn.Parameter(torch.randn(9, 9) / 3)
        self.bias = nn.Parameter(torch.randn(9))
        self.out, self.only = nn.Linear(9, 5), nn.Linear(9, 9, bias=False)
        self.checkpointed = checkpointed

    def block(self, h: Tensor) -> Tensor:
        h = torch.tanh(F.linear(h, self.weight, self.bias))
        h = torch.tanh(torch.relu_(self.only(h) + F.linear(h, self.only.weight.abs(), self.bias)))
        return torch.tanh(h @ self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointed else self.block(h)
        return (self.out(h).square().mean((1, 2)) + (h @ self.table.weight.T).square().mean((1, 2))) / 2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_a_weight_with_several_uses(group: int, checkpointed: bool, form: str) -> None:
    torch.manual_seed(0)
    model, ids = Odd(checkpointed).double(), torch.randint(11, (5, 3))
    results = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = PerInstanceSAM(rho=0.1, group=group, engine=engine).backward(model, ids, lambda m, x: m(x))
        results.append((step.perturbed_losses, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for mine, exact in zip(*results, strict=True):
        assert relative(mine, exact) < 1e-9


class Detached(nn.Module):
    """Layers that are called with the batch, and without a graph in other ways: nothing of that is recorded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.down, self.up, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.down(x))
        with nullcontext() if self.how == "detached" else torch.no_grad():
            unit = torch.eye(8, dtype=x.dtype)
            norm = self.up.weight.norm() if self.how == "norm" else self.up(self.down(unit)).norm(dim=0)
        return self.out(torch.tanh(h / norm.detach())).mean((1, 2))


@pytest.mark.parametrize(("how", "n"), [("detached", 3), ("detached", 8), ("no_grad", 3), ("norm", 3)])
def test_a_layer_that_is_also_used_in_another_way(how: str, n: int, form: str) -> None:
    torch.manual_seed(0)
    model, x = Detached(how).double(), torch.randn(n, 5, 8).double()
    results = []
    for engine in ("low-rank", "loop"):
        model.zero_grad()
        for _ in range(2):  # the first step compares with autograd
            model.zero_grad()
            step = PerInstanceSAM(rho=0.1, engine=engine).backward(model, x, lambda m, x: m(x) ** 2)
        results.append((step.perturbed_losses, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for mine, exact in zip(*results, strict=True):
        assert relative(mine, exact) < 1e-9


def test_a_layer_takes_no_product_more_than_sam(written: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the shared product and one with the perturbation: only one, with one matrix per group."""
    monkeypatch.setattr(_perturbation, "add_linear", None)
    monkeypatch.setattr(_perturbation, "linear_move", None)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(4, 6, 5)
    PerInstanceSAM().backward(model, x, lambda m, x: m(x).square().sum((1, 2)))


def test_the_matrices_take_the_memory_of_the_gradients(written: None) -> None:
    model, x = nn.Linear(6, 4, bias=False), torch.randn(3, 5, 6)
    recording = record(model, lambda: model(x).square().sum((1, 2))).for_one_pass()
    (factor,) = recording.gradients.factors[id(model.weight)]
    assert isinstance(factor, Dense)
    gradient, c = factor.value, 0.1 / recording.norms
    wanted = model.weight + c.view(-1, 1, 1) * gradient
    with recording.perturbed(c):
        model(x)
    torch.testing.assert_close(gradient, wanted.detach())


def test_inputs_and_output_gradients_are_not_held_beside_what_is_written_out(
    written: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[int, int]] = []

    def watched(calls: list[Any], found: list[Any], *args: Any, **kwargs: Any) -> Any:
        made = _gradient.collect(calls, found, *args, **kwargs)
        left.append((len(calls), len(found)))
        return made

    monkeypatch.setattr(_recording, "collect", watched)
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(4, 6, 5)
    for _ in range(2):
        record(model, lambda: model(x).square().sum((1, 2)))
    assert left == [(2, 2), (0, 0)]  # the first pass is compared with autograd, which needs them


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with the kernel; on the CPU its definition is used."""
    for module in (_perturbation, _gradient):
        monkeypatch.setattr(module, "rounding_of", lambda dtype, _: "bf16" if dtype is torch.bfloat16 else "none")


def _rise(model: nn.Module, x: Tensor, rho: float, *, half: bool) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        step = PerInstanceSAM(rho=rho).backward(model, x, lambda m, x: m(x).float().square().mean((1, 2)))
    return step.perturbed_losses - step.losses, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("on_the_grid", [False, True], ids=["any weights", "bfloat16 checkpoint"])
def test_the_perturbation_arrives_in_bfloat16(
    on_the_grid: bool, rounded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is far below the spacing of the weights, where rounding to nearest would lose it."""
    monkeypatch.setattr(_gradient, "choose", lambda layers, on, most=None: FORMS["written"](layers))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    if on_the_grid:
        model.bfloat16().float()
    x, rho = torch.randn(4, 64, 128), 0.005
    wanted, gradient = _rise(model, x, rho, half=False)
    found, ours = _rise(model, x, rho, half=True)
    assert float(found.mean() / wanted.mean()) == pytest.approx(1, abs=0.05)
    assert float(F.cosine_similarity(ours, gradient, dim=0)) > 0.999
    if on_the_grid:
        monkeypatch.setattr(instances, "by_torch", lambda w, d, c, grid: w + c.view(-1, *(1,) * w.ndim) * d)
        lost, _ = _rise(model, x, rho, half=True)  # rounded to nearest when it is copied to its dtype
        assert float(lost.mean() / wanted.mean()) < 0.5


def test_the_same_layers_in_both_forms_agree_in_bfloat16(rounded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(4, 48, 64)
    found = []
    for name in ("low-rank", "written"):
        monkeypatch.setattr(_gradient, "choose", lambda layers, on, most=None, name=name: FORMS[name](layers))
        found.append(_rise(model, x, 0.02, half=True))
    for low_rank, written in zip(*found, strict=True):
        assert relative(written, low_rank) < 0.05


def test_without_the_kernel_half_precision_adds_a_product(written: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are rounded to nearest would lose the perturbation."""
    monkeypatch.setattr(_perturbation, "own_values", None)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 8, 64)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            step = PerInstanceSAM(rho=0.1).backward(model, x, lambda m, x: m(x).float().square().mean((1, 2)))
        assert (step.perturbed_losses > step.losses).all()


class Two(nn.Module):
    """A layer that is used in two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        with torch.autocast("cpu", enabled=False):
            return (self.layer(h.float()) - self.layer(x)).square().mean((1, 2))


def test_one_layer_in_two_precisions(form: str, rounded: None) -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 8, 16)
    risen = []
    for half in (False, True):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                step = PerInstanceSAM(rho=0.1, engine="low-rank").backward(model, x, lambda m, x: m(x))
        risen.append(step.perturbed_losses - step.losses)
    assert relative(risen[1], risen[0]) < 0.05


# -- the choice -------------------------------------------------------------------------------------------------------


def _kinds(model: nn.Module, x: Tensor, **options: Any) -> list[str]:
    found: list[str] = []
    recording = record(model, lambda: model(x).square().sum((1, 2)), **options)
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        found += [type(f).__name__ for f in recording.gradients.factors[id(layer.weight)]]
    return found


def test_short_texts_are_low_rank_and_long_ones_written_out() -> None:
    model = nn.Linear(96, 96)
    assert _kinds(model, torch.randn(2, 8, 96)) == [LowRank.__name__]
    assert _kinds(model, torch.randn(2, 96, 96)) == [Dense.__name__]


def test_frozen_weights_take_their_smallest_form() -> None:
    model, x = nn.Linear(96, 96), torch.randn(2, 40, 96)
    assert _kinds(model, x, most=2**30) == ["Dense"]
    model.weight.requires_grad_(False)
    params = dict(model.named_parameters())
    assert _kinds(model, x, params=params) == ["LowRank"]
    assert _kinds(model, x, params=params, most=2**30) == ["Dense"]


def test_max_extra_memory_bounds_what_is_kept() -> None:
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4)))
    x, matrix = torch.randn(2, 40, 96), 2 * 96 * 96 * 4
    low_rank = 2 * 40 * (96 + 96) * 4
    seen = [_kinds(model, x, most=most) for most in (0, 4 * low_rank, 2 * low_rank + 2 * matrix, 4 * matrix)]
    assert [kinds.count("Dense") for kinds in seen] == [0, 0, 2, 4]
    for most in (2 * low_rank + 2 * matrix, 4 * matrix):
        recording = record(model, lambda: model(x).square().sum((1, 2)), most=most)
        assert recording.gradients.kept_of_matrices() <= most


def test_a_bound_that_cannot_be_met_is_said_once() -> None:
    model, x = nn.Linear(96, 96), torch.randn(4, 8, 96)
    needed = 4 * 8 * (96 + 96) * 4
    method = PerInstanceSAM(max_extra_memory=needed // 2)

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2))

    with pytest.warns(UserWarning, match="at_once=2"):
        method.backward(model, x, objective)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.backward(model, x, objective)
        PerInstanceSAM(max_extra_memory=needed // 2, at_once=2).backward(nn.Linear(96, 96), x, objective)


def test_the_bound_changes_the_form_and_not_the_step() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)).double(), torch.randn(3, 9, 24).double()
    found = []
    for most in (None, 0, 10**9):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PerInstanceSAM(rho=0.1, max_extra_memory=most).backward(model, x, lambda m, x: m(x).square().sum((1, 2)))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(found[0], found[1]) < 1e-12
    assert relative(found[2], found[1]) < 1e-12


def test_a_wrong_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_extra_memory"):
        PerInstanceSAM(max_extra_memory=-1)
