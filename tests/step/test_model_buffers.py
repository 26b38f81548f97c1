"""Large buffers are copied only if passes change them, and every pass of a step starts with the same values."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deltasam import MicroBatches
from deltasam.methods import ERM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.speed.splitting import Splitting
from deltasam.step import model_buffers
from deltasam.step.model_buffers import SMALL
from deltasam.step.randomness import Replay
from deltasam.weighting import OwnGradient

LARGE = 10 * 2**20 // 4  # entries of 10 MB

METHODS: dict[str, Callable[[], Any]] = {
    "sam": SAM,
    "delta-sam": DeltaSAM,
    "own-gradient": lambda: DeltaSAM(weighting=OwnGradient()),
    "low-rank": lambda: PerInstanceSAM(engine="low-rank"),
    "loop": lambda: PerInstanceSAM(engine="loop"),
    "splitting": lambda: Splitting(SAM()),
}
each_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
each_batch = pytest.mark.parametrize("split", [False, True], ids=["batch", "micro-batches"])


class Holding(nn.Module):
    """A layer with a buffer that passes change in a given way; keeps the values that passes start with."""

    def __init__(self, change: Callable[[Holding], None] | None = None, entries: int = SMALL) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(3, 1)
        self.register_buffer("held", torch.zeros(entries))
        self.change = change
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(self.held[0]))
        if self.change is not None:
            self.change(self)
        losses: Tensor = self.out(x).squeeze(-1)
        return losses


def adds(model: Holding) -> None:
    model.held += 1


def replaces(model: Holding) -> None:
    model.held = model.held + 1


def hides(model: Holding) -> None:
    model.held.data += 1


CHANGES = pytest.mark.parametrize("change", [adds, replaces, hides], ids=lambda change: change.__name__)


def objective(model: nn.Module, x: Tensor) -> Tensor:
    losses: Tensor = model(x).square()
    return losses


def batch(split: bool = False) -> Any:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    return MicroBatches([x[:2], x[2:]]) if split else x


class Copied(TorchDispatchMode):
    """Counts the bytes of large tensors that are cloned, or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.bytes += result.nbytes if result.nbytes > SMALL else 0
        return result


def copied_by(step: Callable[[], Any]) -> int:
    with Copied() as copied:
        step()
    return copied.bytes


@each_batch
@each_method
def test_a_large_buffer_that_never_changes_is_copied_in_the_first_step_only(
    make: Callable[[], Any], split: bool
) -> None:
    model, method = Holding(entries=LARGE), make()
    own, place = model.held, model.held.data_ptr()
    copied = [copied_by(lambda: method.backward(model, batch(split), objective)) for _ in range(4)]
    assert copied[0] >= 4 * LARGE
    assert copied[1:] == [0, 0, 0]
    assert model.held is own
    assert own.data_ptr() == place


@CHANGES
@each_batch
@each_method
def test_a_buffer_that_changes_has_the_values_of_plain_training(
    make: Callable[[], Any], split: bool, change: Callable[[Holding], None]
) -> None:
    """In every pass of every step."""
    plain, model, method = Holding(change), Holding(change), make()
    for _ in range(4):
        plain.seen.clear()
        model.seen.clear()
        ERM().backward(plain, batch(split), objective)
        method.backward(model, batch(split), objective)
        assert len(model.seen) > len(plain.seen)
        assert set(model.seen) == set(plain.seen)
        assert torch.equal(model.held, plain.held)


@pytest.mark.parametrize("change", [adds, hides])
def test_values_are_compared_once(change: Callable[[Holding], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator a comparison waits for the device."""
    compared = []
    monkeypatch.setattr(model_buffers, "_are_equal", lambda a, b: bool(compared.append(0)) or torch.equal(a, b))
    constant, changing = Holding(), Holding(change)
    for _ in range(4):
        SAM().backward(constant, batch(), objective)
        SAM().backward(changing, batch(), objective)
    assert len(compared) == (1 if change is adds else 2)


def test_nothing_is_compared_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that were constant in an ordinary step are not copied, others are."""
    compared = []
    monkeypatch.setattr(model_buffers, "_are_equal", lambda a, b: bool(compared.append(0)) or torch.equal(a, b))
    known, unknown = Holding(), Holding()
    SAM().backward(known, batch(), objective)
    monkeypatch.setattr(model_buffers, "is_recorded", lambda device: True)
    assert copied_by(lambda: SAM().backward(known, batch(), objective)) == 0
    for _ in range(2):
        assert copied_by(lambda: SAM().backward(unknown, batch(), objective)) > 0
    assert len(compared) == 1


@contextmanager
def one_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    assert ["'held'" in str(each.message) for each in found] == [True]


@pytest.mark.parametrize("method", [SAM(), DeltaSAM(), PerInstanceSAM(engine="low-rank")], ids=str)
def test_a_late_change_warns_and_later_steps_are_right(method: Method) -> None:
    model, plain = Holding(), Holding(adds)
    for _ in range(2):
        method.backward(model, batch(), objective)
    model.change = adds
    with one_warning():
        method.backward(model, batch(), objective)
    with torch.no_grad():
        plain.held.copy_(model.held)
    for _ in range(2):
        plain.seen.clear()
        model.seen.clear()
        ERM().backward(plain, batch(), objective)
        method.backward(model, batch(), objective)
        assert set(model.seen) == set(plain.seen)
        assert torch.equal(model.held, plain.held)


def test_a_late_change_at_w_happens_once() -> None:
    model = Holding()
    for _ in range(2):
        SAM().backward(model, batch(), objective)
    model.change = adds
    with one_warning():
        SAM().backward(model, batch(), objective)
    assert float(model.held[0]) == 1


def test_a_late_replacement_needs_no_copy() -> None:
    model, plain = Holding(), Holding(replaces)
    for _ in range(2):
        DeltaSAM().backward(model, batch(), objective)
    model.change = replaces
    for _ in range(3):
        model.seen.clear()
        plain.seen.clear()
        DeltaSAM().backward(model, batch(), objective)
        ERM().backward(plain, batch(), objective)
        assert set(model.seen) == set(plain.seen)
        assert torch.equal(model.held, plain.held)


@each_method
def test_a_buffer_that_changes_in_training_mode_only_is_right_after_evaluation_mode(make: Callable[[], Any]) -> None:
    def in_training(model: Holding) -> None:
        if model.training:
            adds(model)

    model, method = Holding(in_training), make()
    for training, value in ((False, 0), (False, 0), (True, 1), (True, 2), (False, 2)):
        model.train(training)
        model.seen.clear()
        method.backward(model, batch(), objective)
        assert len(set(model.seen)) == 1
        assert float(model.held[0]) == value


def test_a_buffer_changed_between_steps_starts_with_the_new_value() -> None:
    model = Holding()
    for step in range(4):
        model.seen.clear()
        SAM().backward(model, batch(), objective)
        assert set(model.seen) == {float(step)}
        model.held += 1
    model.held = torch.full((SMALL,), 9.0)
    model.seen.clear()
    SAM().backward(model, batch(), objective)
    assert set(model.seen) == {9.0}


def test_a_buffer_filled_by_the_first_pass_has_the_value_at_w_and_is_not_copied_later() -> None:
    def fills(model: Holding) -> None:
        if model.cache is None:
            model.cache = model.out.weight.detach().repeat(SMALL, 1)

    for method in (SAM(rho=0.5), DeltaSAM(rho=0.5)):
        model = Holding(fills, entries=1)
        model.register_buffer("cache", None)
        copied = [copied_by(lambda: method.backward(model, batch(), objective)) for _ in range(4)]  # noqa: B023
        assert torch.equal(model.cache[:1], model.out.weight)
        assert copied[2:] == [0, 0]


@pytest.mark.parametrize("changes", [True, False])
def test_a_shared_large_buffer_stays_shared(changes: bool) -> None:
    model = Holding()
    model.other = Holding()
    model.other.held = model.held
    for step in range(3):
        replay = Replay(model, ())
        for _ in range(2):
            with replay.extra():
                assert model.held is model.other.held
                assert float(model.held[0]) == step * changes
                model.held += int(changes)
                assert float(model.other.held[0]) == (step + 1) * changes
        if changes:
            model.held += 1
        assert model.held is model.other.held


@pytest.mark.parametrize("name", ["sam", "delta-sam", "loop", "splitting"])
def test_statistics_and_norms_are_those_of_plain_training(name: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), spectral, nn.Linear(8, 1), nn.Flatten(0))

    plain, model, method = net(), net(), METHODS[name]()
    if name == "loop":  # instances must not mix
        plain[1].eval()
        model[1].eval()
    for _ in range(3):
        ERM().backward(plain, batch(), objective)
        method.backward(model, batch(), objective)
        for own, expected in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own, expected)


def test_nothing_is_kept_alive() -> None:
    model = Holding()
    for _ in range(2):
        SAM().backward(model, batch(), objective)
    held = weakref.ref(model.held)
    del model
    gc.collect()
    assert held() is None
