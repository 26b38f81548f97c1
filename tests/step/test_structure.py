"""What a step remembers about a model is compared with the model: after any change it is as if the model were new."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import SAM
from deltasam.step.checks import check_move
from deltasam.step.structure import Structure


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.norm, self.nothing = nn.BatchNorm1d(3), None
        self.register_module("empty", None)
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(self.norm(x))))
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Dropout(0.0), Block()).double()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(-1)


X = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)


def assert_listed(model: nn.Module) -> None:
    found = Structure(model)
    assert len(found.modules) == len(list(model.modules()))
    assert all(a is b for a, b in zip(found.modules, model.modules(), strict=True))
    wanted = dict(model.named_parameters())
    assert list(found.named) == list(wanted)
    assert all(found.named[name] is p for name, p in wanted.items())
    assert list(found.trainable) == [name for name, p in wanted.items() if p.requires_grad]
    assert found.modes == bytes(module.training for module in model.modules())
    held = [b for own in found.with_buffers[1] for b in own.values() if b is not None]
    assert {id(b) for b in held} == {id(b) for b in model.buffers()}
    assert found.size == (len(found.modules), sum(len(vars(module)) for module in model.modules()))


def add_parameter(model: nn.Sequential) -> None:
    model[2].register_parameter("absent", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model[2].register_forward_hook(lambda module, _, y: y * module.absent)


def replace_module(model: nn.Sequential) -> None:
    model[2].first = nn.Linear(3, 3, dtype=torch.float64)


def replace_parameter(model: nn.Sequential) -> None:
    model[0].first.weight = nn.Parameter(torch.eye(3, dtype=torch.float64))


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 2, dtype=torch.float64))


def remove(model: nn.Sequential) -> None:
    del model[2]


def exchange(model: nn.Sequential) -> None:
    model[0], model[2] = model[2], model[0]


def tie(model: nn.Sequential) -> None:
    model[0].second.weight = model[2].second.weight


def tie_modules(model: nn.Sequential) -> None:
    model[2].first = model[0].first


def freeze(model: nn.Sequential) -> None:
    model[0].first.requires_grad_(False)


def other_memory(model: nn.Sequential) -> None:
    model[0].first.weight.data = model[0].first.weight.data.clone() + 1


def evaluate(model: nn.Sequential) -> None:
    model[0].norm.eval()


def add_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("calls", torch.zeros((), dtype=torch.float64))
    model[0].register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)


def move_parameter(model: nn.Sequential) -> None:
    """To the next module: the list of all parameters stays the same."""
    first, second = model[0].first, model[0].second
    second.bias = None
    bias = first.bias
    first.bias = None
    second.bias = bias


def rename(model: nn.Sequential) -> None:
    held = model[0].second
    weight = held.weight
    del held.weight
    held.register_parameter("kernel", weight)
    held.forward = lambda x: x @ held.kernel.T


CHANGES: list[Callable[[nn.Sequential], None]] = [
    add_parameter, replace_module, replace_parameter, append, remove, exchange, tie, tie_modules, freeze, other_memory,
    evaluate, add_buffer, move_parameter, rename,
]  # fmt: skip
each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@each_change
def test_a_changed_model_is_listed_as_a_new_one(change: Callable[[nn.Sequential], None]) -> None:
    model = network()
    for _ in range(2):
        assert_listed(model)
    change(model)
    for _ in range(2):
        assert_listed(model)


@each_change
def test_a_step_of_a_changed_model_is_that_of_a_new_one(change: Callable[[nn.Sequential], None]) -> None:
    model, new = network(), network()
    for _ in range(2):
        SAM(rho=0.1).backward(model, X, objective)
    model.zero_grad()
    model.load_state_dict(new.state_dict())  # BatchNorm's statistics
    torch.manual_seed(1)
    change(model)
    torch.manual_seed(1)
    change(new)
    for _ in range(2):
        for each in (model, new):
            SAM(rho=0.1).backward(each, X, objective)
    for (name, p), (other, q) in zip(model.named_parameters(), new.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), new.buffers(), strict=True))


def test_a_copy_and_a_converted_model() -> None:
    model = network()
    assert_listed(model)
    other = copy.deepcopy(model)
    assert_listed(other)
    assert_listed(model.float())
    assert {id(p) for p in Structure(model).named.values()}.isdisjoint(map(id, Structure(other).named.values()))


def test_a_model_that_lists_its_parameters_itself() -> None:
    class Own(nn.Linear):
        def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            yield "matrix", self.weight

    model = Own(2, 2)
    for _ in range(2):
        assert list(Structure(model).named) == ["matrix"]


def test_torchscript() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for _ in range(2):
        assert list(Structure(model).named) == [name for name, _ in model.named_parameters()]


def test_nothing_is_kept_alive() -> None:
    model = network()
    model[0].owner = [model]
    for _ in range(2):
        SAM().backward(model, X, objective)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


# -- the check for shared memory --------------------------------------------------------------------------------------


def flat() -> tuple[nn.Module, Tensor]:
    """Three parameters side by side in one memory."""
    memory, model = torch.randn(12), nn.Module()
    for k in range(3):
        model.register_parameter(f"p{k}", nn.Parameter(memory[4 * k : 4 * k + 4]))
    return model, memory


def share(model: nn.Module, _: Tensor) -> None:
    model.p2.data = model.p0.data


def grow(model: nn.Module, memory: Tensor) -> None:
    model.p0.data = memory[:8]


def grow_in_place(model: nn.Module, memory: Tensor) -> None:
    with torch.no_grad():
        model.p1.set_(memory[4:12])


def become_contiguous(model: nn.Module, memory: Tensor) -> None:
    model.p0.data = memory[:4]


def add_one(model: nn.Module, memory: Tensor) -> None:
    model.p3 = nn.Parameter(memory[2:3])


@pytest.mark.parametrize("change", [share, grow, grow_in_place, become_contiguous, add_one])
@pytest.mark.parametrize("frozen", [False, True])
def test_new_sharing_is_found(change: Callable[[nn.Module, Tensor], None], frozen: bool) -> None:
    model, memory = flat()
    if change is become_contiguous:
        model.p0.data, model.p1.data = memory[:12:3], memory[1:3]
    model.p1.requires_grad_(not frozen)

    def check() -> None:
        found = Structure(model)
        check_move(model, found.trainable.values(), found.named)

    for _ in range(2):
        check()
    change(model, memory)
    for _ in range(2):
        with pytest.raises(ValueError, match="share memory"):
            check()


def test_another_selection_is_checked_anew() -> None:
    model, _ = flat()
    model.p1.data = model.p0.data
    named = dict(model.named_parameters())
    for _ in range(2):
        check_move(model, [model.p2], named)
    with pytest.raises(ValueError, match="'p0' and 'p1'"):
        check_move(model, [model.p2, model.p0], named)


def test_a_parameter_that_becomes_complex_is_found() -> None:
    model, memory = flat()
    named = dict(model.named_parameters())
    for _ in range(2):
        check_move(model, named.values(), named)
    model.p0.data = torch.view_as_complex(memory[:4].view(2, 2))
    with pytest.raises(TypeError, match="'p0' is complex"):
        check_move(model, named.values(), named)


def test_parameters_without_plain_memory_are_checked_in_every_step() -> None:
    model, _ = flat()
    model.sparse = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    named = dict(model.named_parameters())
    moved = [model.p0, model.p1]
    for _ in range(2):
        check_move(model, moved, named)
    model.p1.data = model.p0.data
    with pytest.raises(ValueError, match="share memory"):
        check_move(model, moved, named)


def test_a_compiled_model_is_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wrapper computes ``training``, which is not among its attributes."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1))
    compiled: Any = torch.compile(model, backend="eager")
    first = Structure(compiled)
    monkeypatch.setattr(nn.Module, "named_parameters", None)
    again = Structure(compiled)
    assert again.named.keys() == first.named.keys()
    assert again.modes == bytes(module.training for module in compiled.modules())
    model[1].eval()
    assert Structure(compiled).modes == bytes([1, 1, 1, 0, 1])
