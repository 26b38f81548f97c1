"""A method and an optimizer combined into one; needs torch alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam.integrations import MethodOptimizer
from deltasam.methods import (
    ASAM,
    AWP,
    ERM,
    ESAM,
    GSAM,
    RWSAM,
    SAM,
    WSAM,
    DeltaSAM,
    FisherSAM,
    FreeLB,
    LookSAM,
    Method,
    MultiStepSAM,
    PerInstanceSAM,
    Step,
    SubsetSAM,
)
from deltasam.step.batches import MicroBatches
from deltasam.step.radius import Scheduled

GRADIENT_ONLY = [
    ERM(),
    SAM(rho=0.1),
    SAM(rho=0.0),
    ASAM(rho=0.5),
    GSAM(rho=0.1),
    WSAM(rho=0.1, gamma=0.8),
    LookSAM(rho=0.3, k=2),
    FisherSAM(rho=0.3, keep=0.5, refresh=2),
    MultiStepSAM(rho=0.1, ascent_steps=2),
    AWP(adv_lr=0.1),
    SAM(rho=0.1, params="no-bias-norm", randomness="independent"),
]
OTHERS = [DeltaSAM(rho=0.1), RWSAM(rho=0.1)]
TAKE_PARTS = [ESAM(rho=0.1), SubsetSAM(rho=0.1)]


def name(method: Method) -> str:
    return f"{type(method).__name__}-{getattr(method, 'rho', '')}-{method.params}"


def network() -> nn.Module:
    """Dropout, BatchNorm, and an unused head."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    model.register_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: [x := layer(x) for key, layer in model.named_children() if key != "unused"][-1]  # type: ignore[method-assign]
    return model


def batches(n: int = 5) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 5, generator=random), torch.randint(3, (6,), generator=random)) for _ in range(n)]


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def backward_closure(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def trained(method: Method, style: str) -> tuple[dict[str, Tensor], list[float], Tensor]:
    """Returns weights, losses and the random state after some steps, in one of several styles."""
    method = replace(method, state={})  # without state
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    losses = []
    if style == "loop":
        for batch in batches():
            base.zero_grad()
            losses.append(float(method.backward(model, batch, objective).loss))
            base.step()
    else:
        optimizer = MethodOptimizer(base, method, model, closure="losses" if style != "backward" else "backward")
        for batch in batches():
            if style == "backward":
                losses.append(float(optimizer.step(backward_closure(model, optimizer, batch))))
            elif style == "losses":
                losses.append(float(optimizer.step(lambda: objective(model, batch))))  # noqa: B023 - called right here
            else:
                losses.append(float(optimizer.step(lambda part: objective(model, part), batch)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, losses, torch.get_rng_state()


def assert_same(first: Any, second: Any) -> None:
    assert all(torch.equal(first[0][key], second[0][key]) for key in first[0]), "the weights or buffers differ"
    assert first[1] == pytest.approx(second[1], abs=1e-6)
    assert torch.equal(first[2], second[2]), "another number of random draws"


@pytest.mark.parametrize("method", GRADIENT_ONLY, ids=name)
def test_a_closure_that_calls_backward_is_the_loop_bit_for_bit(method: Method) -> None:
    assert_same(trained(method, "backward"), trained(method, "loop"))


@pytest.mark.parametrize("method", GRADIENT_ONLY + OTHERS, ids=name)
def test_a_closure_that_returns_losses_is_the_loop_bit_for_bit(method: Method) -> None:
    assert_same(trained(method, "losses"), trained(method, "loop"))


@pytest.mark.parametrize("method", OTHERS + TAKE_PARTS, ids=name)
def test_a_closure_of_the_batch_is_the_loop_bit_for_bit(method: Method) -> None:
    assert_same(trained(method, "batch"), trained(method, "loop"))


def test_without_a_perturbation_it_is_the_optimizer_alone() -> None:
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    losses = [base.step(backward_closure(model, base, batch)).item() for batch in batches()]
    plain = {key: value.clone() for key, value in model.state_dict().items()}, losses, torch.get_rng_state()
    assert_same(trained(SAM(rho=0.0), "backward"), plain)
    assert_same(trained(ERM(), "losses"), plain)


@pytest.mark.parametrize("method", [FreeLB(embeddings="0"), PerInstanceSAM(rho=0.1)], ids=name)
def test_methods_that_look_inside_the_model_work_through_losses(method: Method) -> None:
    x, y = torch.arange(12).view(4, 3), torch.tensor([0, 1, 2, 0])
    results = []
    for style in ("loop", "closure"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 3))
        base = torch.optim.SGD(model.parameters(), lr=0.5)
        if style == "loop":
            replace(method, state={}).backward(model, (x, y), objective)
            base.step()
        else:
            MethodOptimizer(base, replace(method, state={}), model, closure="losses").step(
                lambda model=model: objective(model, (x, y))
            )
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_micro_batches_are_one_batch() -> None:
    results = []
    inputs, labels = batches(1)[0]
    for batch in ((inputs, labels), MicroBatches([(inputs[:4], labels[:4]), (inputs[4:], labels[4:])])):
        model = network().eval().double()
        optimizer = MethodOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), SAM(rho=0.1), model, closure="losses")
        optimizer.step(lambda part: objective(model, (part[0].double(), part[1])), batch)  # noqa: B023
        results.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.allclose(results[0][key], results[1][key], atol=1e-12) for key in results[0])


@pytest.mark.parametrize("method", [SAM(), LookSAM(k=2)], ids=name)
def test_accumulation_inside_the_closure(method: Method) -> None:
    """A closure may run over micro-batches: the perturbation is then that of the large batch."""
    results = []
    inputs, labels = batches(1)[0]
    for parts in (1, 3):
        model = network().eval().double()
        optimizer = MethodOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), replace(method, state={}), model)

        def closure() -> float:
            optimizer.zero_grad()  # noqa: B023
            total = 0.0
            for x, y in zip(inputs.double().chunk(parts), labels.chunk(parts), strict=True):  # noqa: B023
                loss = cross_entropy(model(x), y) / parts  # noqa: B023
                loss.backward()
                total += loss.item()
            return total

        for _ in range(2):
            optimizer.step(closure)
        results.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.allclose(results[0][key], results[1][key], atol=1e-12) for key in results[0])


# -- the optimizer interface ------------------------------------------------------------------------------------------


def wrapped(method: Method | None = None, **options: Any) -> tuple[nn.Module, torch.optim.AdamW, MethodOptimizer]:
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, base, MethodOptimizer(base, SAM() if method is None else method, model, **options)


def test_everything_is_delegated_to_the_optimizer() -> None:
    model, base, optimizer = wrapped()
    optimizer.step(backward_closure(model, optimizer, batches(1)[0]))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.state is base.state
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults is base.defaults
    assert optimizer.state_dict().keys() == base.state_dict().keys()
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert base.param_groups[1]["lr"] == 0.5
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert "SAM(" in repr(optimizer)
    assert "AdamW" in repr(optimizer)


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_loads_with_and_without(saved_with: bool, loaded_with: bool) -> None:
    model, base, optimizer = wrapped()
    for batch in batches(3):
        optimizer.step(backward_closure(model, optimizer, batch))
    checkpoint = copy.deepcopy((optimizer if saved_with else base).state_dict())
    other, other_base, other_optimizer = wrapped()
    other.load_state_dict(model.state_dict())
    (other_optimizer if loaded_with else other_base).load_state_dict(checkpoint)
    for batch in batches(2):
        for each, stepped in ((model, optimizer), (other, other_optimizer)):
            torch.manual_seed(0)
            stepped.step(backward_closure(each, stepped, batch))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("on_wrapper", [True, False])
def test_schedulers(on_wrapper: bool) -> None:
    model, base, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer if on_wrapper else base, 1.0, 0.5, total_iters=2)
    rates = []
    for batch in batches(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(backward_closure(model, optimizer, batch))
        scheduler.step()  # warns (an error here) if it does not detect the step
    assert rates == pytest.approx([0.05, 0.0375, 0.025])


def test_clipping_by_a_hook_sees_the_methods_gradient() -> None:
    model, _, optimizer = wrapped()
    norms = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
    )
    optimizer.step(backward_closure(model, optimizer, batches(1)[0]))
    assert len(norms) == 1
    assert norms[0] > 0.01
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_closure_may_have_an_attribute_args() -> None:
    model, _, optimizer = wrapped()
    closure = backward_closure(model, optimizer, batches(1)[0])

    class Settings:
        args = SimpleNamespace(lr=0.1)  # as from argparse

        def __call__(self) -> Tensor:
            return closure()

    assert float(optimizer.step(Settings())) > 0


def test_copies_and_pickles() -> None:
    _, _, optimizer = wrapped(closure="losses")
    optimizer.model = nn.Linear(5, 3)  # the network above has a lambda
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.closure == "losses"
        assert other.method == optimizer.method
        assert len(other.param_groups[0]["params"]) == len(optimizer.param_groups[0]["params"])


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*OTHERS, *TAKE_PARTS, FreeLB(), PerInstanceSAM()], ids=name)
def test_a_method_that_needs_losses_raises(method: Method) -> None:
    model, _, optimizer = wrapped(replace(method, state={}))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"{type(method).__name__} .*closure=\"losses\".*reduction=\"none\""):
        optimizer.step(backward_closure(model, optimizer, batches(1)[0]))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("style", "wanted"), [("backward", r"loss\.backward\(\)"), ("losses", r"\(N,\)")])
def test_no_closure(style: Any, wanted: str) -> None:
    with pytest.raises(TypeError, match=rf"closure that .*{wanted}.*MethodTrainer"):
        wrapped(closure=style)[2].step()


@pytest.mark.parametrize("inner", ["wrapper", "base"])
@pytest.mark.parametrize("style", ["backward", "losses"])
def test_a_closure_that_steps_is_refused(inner: str, style: Any) -> None:
    model, base, optimizer = wrapped(closure=style)
    batch = batches(1)[0]
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        losses = objective(model, batch)
        if style == "backward":
            losses = losses.mean()
            losses.backward()
        base.step() if inner == "base" else optimizer.step(closure)
        return losses

    with pytest.raises(RuntimeError, match=r"the closure calls optimizer.step\(\)"):
        optimizer.step(closure)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.step(lambda: objective(model, batch)) if style == "losses" else optimizer.step(
        backward_closure(model, optimizer, batch)
    )


@pytest.mark.parametrize(
    ("style", "closure", "error", "match"),
    [
        ("backward", lambda model, losses: None, TypeError, "NoneType.*return loss"),
        ("backward", lambda model, losses: losses, ValueError, r"shape \(6,\).*closure=\"losses\""),
        ("backward", lambda model, losses: losses.mean(), ValueError, r"call loss\.backward\(\)"),
        ("losses", lambda model, losses: losses.mean(), ValueError, "scalar"),
        ("losses", lambda model, losses: None, TypeError, "NoneType"),
    ],
)
def test_bad_closures(style: Any, closure: Any, error: type[Exception], match: str) -> None:
    model, _, optimizer = wrapped(closure=style)
    with pytest.raises(error, match=match):
        optimizer.step(lambda: closure(model, objective(model, batches(1)[0])))


@pytest.mark.parametrize("method", TAKE_PARTS, ids=name)
def test_methods_that_take_parts_ask_for_the_batch(method: Method) -> None:
    model, _, optimizer = wrapped(method, closure="losses")
    with pytest.raises(ValueError, match=r"optimizer\.step\(closure, batch\)"):
        optimizer.step(lambda: objective(model, batches(1)[0]))


def test_bad_arguments() -> None:
    model, base, _ = wrapped()
    with pytest.raises(TypeError, match="optimizer="):
        MethodOptimizer(torch.optim.SGD, SAM(), model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="method="):
        MethodOptimizer(base, SAM, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closure='loss'"):
        MethodOptimizer(base, SAM(), model, closure="loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer=LBFGS"):
        MethodOptimizer(torch.optim.LBFGS(model.parameters()), SAM(), model)
    with pytest.raises(TypeError, match="model=AdamW"):
        MethodOptimizer(base, SAM(), base)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer \(AdamW\).*model \(Linear\)"):
        MethodOptimizer(base, SAM(), nn.Linear(5, 3))


def test_a_closure_that_calls_backward_instead_of_returning_losses() -> None:
    model, _, optimizer = wrapped(DeltaSAM(), closure="losses")
    with pytest.raises(RuntimeError, match=r"backward\(\)"):
        optimizer.step(backward_closure(model, optimizer, batches(1)[0]))


def test_a_scheduled_radius_follows_the_learning_rate() -> None:
    def objective(batch: Tensor) -> Tensor:
        return model(batch).squeeze(-1) ** 2

    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: (1.0, 0.5, 0.25)[min(step, 2)])
    method = SAM(rho=Scheduled(0.1, start=0.25, after="lr"))
    method.set_progress(total=4)
    radii: list[float | None] = []

    class Recorder(SAM):
        """Records the radius of every step."""

        def count_step(self, step: Step) -> Step:
            radii.append(None if step.radius is None else float(step.radius))
            return super().count_step(step)

    optimizer = MethodOptimizer(sgd, Recorder(rho=method.rho, state=method.state), model, closure="losses")
    for _ in range(3):
        optimizer.step(lambda: objective(batch))
        schedule.step()
    assert radii[0] is None  # before the start: the length that was told stays known
    assert radii[1:] == pytest.approx([0.05, 0.025])
    fixed = MethodOptimizer(sgd, SAM(rho=0.1), model, closure="losses")
    fixed.step(lambda: objective(batch))
    assert "progress" not in fixed.method.state
