"""An interruption (Ctrl-C, a signal handler that raises) at any line, including those that restore something."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deltasam
from deltasam._torch import recomputed_by
from deltasam.methods import SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.objectives.regularisers import perturbed_embeddings
from deltasam.per_instance import record
from deltasam.step.gradients import set_aside
from deltasam.step.model_buffers import ModelBuffers
from deltasam.step.moving import _in_place, perturbed

ROOT = str(deltasam.__path__[0])
CONTEXTS = str(contextlib.__file__)
MODES = str(torch.autograd.grad_mode.__file__)
OURS = (
    "_torch.py",
    "per_instance/",
    *(f"step/{name}.py" for name in ("described", "model_buffers", "moving", "norms", "randomness")),
)
LENDING = (CONTEXTS, MODES, *(f"{ROOT}/{name}" for name in OURS))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.eval()


def places(model: nn.Module) -> list[Any]:
    """Everything of a model that a pass may replace for a time."""
    own: list[Any] = [(type(p), p.data_ptr()) for p in model.parameters()]
    return own + [b.data_ptr() for b in model.buffers()]


def moved(model: nn.Module) -> AbstractContextManager[Any]:
    params = list(model.parameters())
    return perturbed(params, [torch.ones_like(p) for p in params], torch.tensor(0.1))


def rewound(model: nn.Module) -> AbstractContextManager[Any]:
    return ModelBuffers(model).rewound()


def instances(model: nn.Module) -> AbstractContextManager[Any]:
    def run() -> Tensor:
        losses: Tensor = model(torch.ones(2, 3)).square().sum(-1)
        return losses

    return record(model, run, size=2).perturbed(torch.ones(2))


@pytest.mark.parametrize("lend", [moved, rewound, instances])
def test_all_is_restored_or_nothing(lend: Callable[[nn.Module], AbstractContextManager[Any]]) -> None:
    model = Net()
    own = places(model)
    context = lend(model)
    seen: list[int] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":  # where an interruption would be raised
            sys.settrace(None)
            seen.append(sum(a != b for a, b in zip(own, places(model), strict=True)))
            sys.settrace(trace)
        return trace

    with context:
        away = sum(a != b for a, b in zip(own, places(model), strict=True))
        sys.settrace(trace)
    sys.settrace(None)
    assert away > 1
    assert away in seen
    assert set(seen) <= {away, 0}
    assert places(model) == own


class Interruption:
    """Ctrl-C at the k-th point where Python checks signals: a function begins, or a C function has returned."""

    def __init__(self, k: int, *files: str) -> None:
        self.left, self.files = k, files

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self.files):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def comes(self, step: Callable[[], Any], look: Callable[[], None]) -> bool:
        """Whether it came during the step; ``look`` is called in the handler, where users save a model.

        Python itself drops an interruption that comes while a generator is deleted.
        """
        sys.setprofile(self)
        try:
            step()
        except KeyboardInterrupt:
            look()
        finally:
            sys.setprofile(None)
            torch.set_grad_enabled(True)
        return self.left < 0


def objective(model: nn.Module, x: Tensor) -> Tensor:
    losses: Tensor = model(x).square().sum(-1)
    return losses


@pytest.mark.parametrize("method", [SAM(), DeltaSAM(), PerInstanceSAM()], ids=lambda m: type(m).__name__)
def test_a_checkpoint_after_an_interruption_holds_the_weights_at_w(method: Method) -> None:
    model, x = Net(), torch.randn(4, 3)
    own, values = places(model), [p.detach().clone() for p in model.parameters()]
    method.backward(model, x, objective)
    attributes = [set(vars(module)) for module in model.modules()]

    def look() -> None:
        assert torch.is_grad_enabled()
        assert places(model) == own
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
        assert [set(vars(module)) for module in model.modules()] == attributes

    k = 0
    while Interruption(k, *LENDING).comes(lambda: method.backward(model, x, objective), look):
        k += 1
    assert k > 100
    look()


@pytest.mark.parametrize("method", [SAM(), DeltaSAM()], ids=lambda m: type(m).__name__)
def test_a_cache_is_restored_together_with_its_length(method: Method) -> None:
    class Cache(nn.Linear):
        def grow(self, size: int) -> None:
            self.size = size
            self.register_buffer("held", torch.ones(size))

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.size:
                self.grow(len(x))
            return super().forward(x) * self.held.sum()

    model = nn.Sequential(Cache(3, 1))
    own: list[Tensor] = []

    def step() -> None:
        model[0].grow(2)
        own[:] = [model[0].held]
        method.backward(model, torch.randn(4, 3), objective)

    def look() -> None:  # before the pass at w, or after it
        assert model[0].held is own[0] or len(model[0].held) == 4
        assert len(model[0].held) == model[0].size

    k = 0
    while Interruption(k, *LENDING).comes(step, look):
        k += 1
    look()
    assert k > 100


def test_weights_that_move_in_place_are_restored_first() -> None:
    """As on a GPU: nothing that could be interrupted is called before the copy."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]

    def step() -> None:
        with _in_place(params, [torch.ones(3), torch.ones(2)], torch.tensor(0.1)):
            assert not torch.equal(params[0], torch.ones(3))

    k = 0
    while Interruption(k, "").comes(step, lambda: None):  # locals of a frame are freed after it
        assert all(torch.equal(p, torch.ones_like(p)) for p in params)
        k += 1
    assert k > 10


def test_gradients_are_added_or_unchanged() -> None:
    params = {str(size): nn.Parameter(torch.ones(size)) for size in (1, 2, 3)}

    def step() -> None:
        with set_aside(params):
            for p in params.values():
                p.grad = torch.ones_like(p)

    def given() -> None:
        for p, value in zip(params.values(), (2.0, 3.0, None), strict=True):
            p.grad = None if value is None else torch.full_like(p, value)

    def found() -> list[float | None]:
        return [None if p.grad is None else float(p.grad.mean()) for p in params.values()]

    k = 0
    given()
    while Interruption(k, "").comes(step, lambda: None):
        assert found() == [2.0, 3.0, None]
        k += 1
    assert found() == [3.0, 4.0, 1.0]
    assert k > 10


def test_no_noise_stays_in_the_embeddings() -> None:
    ids = torch.arange(4)

    def noise_is_left(k: int) -> bool | None:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
        wanted = model(ids)

        def step() -> None:
            with perturbed_embeddings(model, lambda site: site.empty().fill_(1.0), embeddings="0"):
                assert not torch.equal(model(ids), wanted)

        return not torch.equal(model(ids), wanted) if Interruption(k, "").comes(step, lambda: None) else None

    found = list(iter(map(noise_is_left, count()).__next__, None))
    assert len(found) > 50
    assert not any(found)


def test_no_way_to_recompute_is_left() -> None:
    """Later checkpointed functions of the thread would be recomputed in this way, too."""
    from torch.utils import checkpoint

    own = dict(vars(checkpoint))

    def step() -> None:
        with recomputed_by(lambda compute: None):
            pass

    k = 0
    while Interruption(k, "").comes(step, lambda: None):
        k += 1
    assert k > 10
    gc.collect()  # an interruption may leave a suspended generator, which restores when it is deleted
    assert dict(vars(checkpoint)) == own
    x = torch.ones(2, requires_grad=True)
    checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
