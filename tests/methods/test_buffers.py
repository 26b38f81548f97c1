"""What a method keeps between steps: free of the loss scale, finite, checkpointed, on the parameters' device.

``test_references.py`` compares steps with slow loops, ``speed/capture`` captures them, ``parallel`` shards them.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import Classification, MicroBatches, measured_arrival
from deltasam.methods import TRAM, FriendlySAM, LookSAM, Method, MomentumSAM, Step, make_step, radius
from deltasam.step.passes import Passes
from helpers.problems import TRANSFORMER_NO_DROPOUT, grads, relative_error


@dataclass(frozen=True, kw_only=True)
class Obvious(Method):
    """A user's Friendly SAM, written the obvious way."""

    rho: float = radius(0.3)
    buffers = ("average",)

    def _step(self, passes: Passes) -> Step:
        losses, grads = passes.gradient()
        average = self.buffer("average", passes)
        direction = [g if g is None else g - m for g, m in zip(grads, average, strict=True)]
        average.update([g if g is None else 0.9 * m + 0.1 * g for g, m in zip(grads, average, strict=True)])
        with passes.ascend(direction, self.rho) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)


METHODS = [Obvious(), FriendlySAM(rho=0.3, sigma=0.5), MomentumSAM(rho=0.3)]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)


def problem(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number)).double()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


def kept(method: Method) -> dict[str, Tensor]:
    (name,) = method.buffers
    return method.state_dict()[name]


def train(method: Method, model: nn.Module, numbers: Any, scale: Any = lambda number: 1.0) -> list[dict[str, Tensor]]:
    """The gradients, without their scale, of steps of plain SGD."""
    found = []
    for number in numbers:
        model.zero_grad()
        factor = scale(number)
        method.backward(model, batch(number), objective, scale=factor)
        size = factor.get_scale() if hasattr(factor, "get_scale") else float(factor)
        found.append({name: g / size for name, g in grads(model).items()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.1 * found[-1][name])
    return found


def scaler(number: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 * number))


@methods
@pytest.mark.parametrize(
    "scale",
    [scaler, lambda number: 3.0**number, lambda number: torch.tensor(7.0**number)],
    ids=["scaler", "float", "tensor"],
)
def test_the_loss_scale_may_change(method: Method, scale: Any) -> None:
    one, other = method.replace(state={}), method.replace(state={})
    wanted, found = train(one, problem(), range(6)), train(other, problem(), range(6), scale)
    assert max(map(relative_error, found, wanted)) < 1e-6
    assert relative_error(kept(other), kept(one)) < 1e-6
    assert all(float(value.abs().max()) > 0 for value in kept(one).values())


@methods
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_changes_nothing(method: Method, bad: float) -> None:
    found = []
    for spoilt in (False, True):
        each, model = method.replace(state={}), problem()
        train(each, model, range(3))
        if spoilt:
            before, x = kept(each), batch(3)
            x[0, 0] = bad
            each.backward(model, x, objective)
            assert all(torch.equal(value, before[name]) for name, value in kept(each).items())
        found.append(train(each, model, [4])[0])
    assert all(torch.equal(g, found[1][name]) for name, g in found[0].items())


@methods
def test_micro_batches(method: Method) -> None:
    found = []
    for split in (False, True):
        each, model = method.replace(state={}), problem()
        for number in range(3):
            model.zero_grad()
            x = batch(number)
            each.backward(model, MicroBatches([x[:2], x[2:]]) if split else x, objective)
        found.append(grads(model))
    assert relative_error(*found) < 1e-10


@methods
def test_gradients_accumulate(method: Method) -> None:
    model, each = problem(), method.replace(state={})
    train(each, model, range(2))
    model.zero_grad()
    state = each.state_dict()
    each.backward(model, batch(7), objective, scale=0.5)
    first = grads(model)
    each.load_state_dict(state)
    each.backward(model, batch(7), objective, scale=0.5)
    assert relative_error(grads(model), {name: 2 * g for name, g in first.items()}) < 1e-12


@methods
def test_a_resumed_run_continues_bit_for_bit(method: Method) -> None:
    whole, model = method.replace(state={}), problem()
    train(whole, model, range(3))
    file = io.BytesIO()
    saved = whole.state_dict()
    torch.save((model.state_dict(), saved), file)
    wanted = train(whole, model, range(3, 6))
    file.seek(0)
    weights, state = torch.load(file)
    assert all(torch.equal(value, saved[method.buffers[0]][n]) for n, value in state[method.buffers[0]].items())
    resumed, other = method.replace(state={}), problem(1)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    found = train(resumed, other, range(3, 6))
    assert all(torch.equal(g, b[n]) for a, b in zip(found, wanted, strict=True) for n, g in a.items())
    lost = problem(1)
    lost.load_state_dict(weights)
    assert relative_error(train(method.replace(state={}), lost, range(3, 6))[0], wanted[0]) > 1e-6


@methods
def test_a_step_that_fails_in_its_last_pass_and_is_repeated_counts_once(method: Method) -> None:
    last = 1 if isinstance(method, MomentumSAM) else 2
    found = []
    for fails in (False, True):
        each, model = method.replace(state={}), problem()
        train(each, model, range(2))
        if fails:
            calls = iter(range(1, 3))

            def exhausted(model: nn.Module, x: Tensor, calls: Any = calls) -> Tensor:
                if next(calls) == last:
                    raise torch.OutOfMemoryError("none left")
                return objective(model, x)

            with pytest.raises(torch.OutOfMemoryError):
                each.backward(model, batch(2), exhausted)
        train(each, model, range(2, 4))
        found.append(kept(each))
    assert relative_error(*found) < 1e-12


@methods
def test_replace_keeps_the_state_and_dataclasses_replace_likewise(method: Method) -> None:
    method, model = method.replace(state={}), problem()
    train(method, model, range(2))
    for other in (method.replace(rho=0.1), dataclasses.replace(method, rho=0.1)):
        assert other.state is method.state
        assert (other.rho, other.steps) == (0.1, 2)
    assert method.replace(state={}).steps == 0


@methods
def test_it_stays_in_place_and_follows_the_parameters(method: Method) -> None:
    method, model = method.replace(state={}), problem()
    train(method, model, range(1))
    key = method.buffer_key()
    train(method, model, range(1, 3))
    assert method.buffer_key() == key
    method.load_state_dict(method.state_dict())
    assert method.buffer_key() != key
    model.float()
    method.backward(model, batch(3).float(), objective)
    assert {value.dtype for value in kept(method).values()} == {torch.float32}
    other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    with pytest.raises(
        ValueError, match=rf"{type(method).__name__} .*'0\.weight'.*\(6, 4\).*\(5, 4\).*load_state_dict"
    ):
        method.backward(other, batch(3).float(), objective)


@methods
def test_parameters_that_are_unfrozen_later(method: Method) -> None:
    method, model = method.replace(state={}), problem()
    model[0].requires_grad_(False)
    method.backward(model, batch(0), objective)
    assert kept(method).keys() == {"2.weight", "2.bias"}
    model[0].requires_grad_(True)
    for number in range(2):
        method.backward(model, batch(number), objective)
    assert kept(method).keys() == dict(model.named_parameters()).keys()


def test_a_buffer_must_be_declared() -> None:
    class Forgetful(Obvious):
        buffers = ()

    with pytest.raises(ValueError, match=r"Forgetful does not declare the buffer 'average'.*buffers = \('average',\)"):
        Forgetful().backward(problem(), batch(0), objective)


def test_momentum_arrives_under_autocast() -> None:
    """The precision that weights are used in is known from the first step, which perturbs nothing."""
    model, data, losses = TRANSFORMER_NO_DROPOUT.make(torch.float32)
    method = MomentumSAM(rho=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16), measured_arrival():
        steps = [method.backward(model, data, losses) for _ in range(2)]
    assert bool(steps[0].skipped)
    assert not bool(steps[1].skipped)
    assert float(steps[1].arrived) == pytest.approx(1, abs=0.15)


def test_look_sam_reuses_the_same_under_another_scale() -> None:
    found = []
    for scale in (1.0, 2.0**10):
        method, model = LookSAM(rho=0.3, k=3), problem()
        method.backward(model, batch(0), objective)
        model.zero_grad()
        method.backward(model, batch(1), objective, scale=scale)
        found.append({name: g / scale for name, g in grads(model).items()})
    assert relative_error(*found) < 1e-12


def test_the_previous_weights_follow_another_dtype() -> None:
    model, method = nn.Sequential(nn.Linear(3, 3)).double(), TRAM(against="previous")
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        step = method.backward(model, (torch.randn(4, 3, dtype=dtype), torch.tensor([0, 1, 2, 0])), Classification())
        assert step.losses.dtype == dtype
        assert {value.dtype for name, value in method.state.items() if name.startswith("previous.")} == {dtype}
