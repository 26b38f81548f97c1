"""TAT needs an extra backward pass towards its target class; the contract of methods holds with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam import SMART, TAT, VAT, Classification, FreeLB, MicroBatches, Objective, RDrop
from deltasam.methods import Method
from helpers.heads import head, texts
from helpers.problems import grads, relative_error


def method(**changes) -> Method:
    settings = {"adv_lr": 0.5, "init_magnitude": 0.1, **changes}
    return TAT(**settings)


def test_weights_streams_and_earlier_gradients_survive_a_failure_in_any_pass() -> None:
    class BoomError(Exception):
        """Raised by the test."""

    class Explosive(Classification):
        """Fails in one call of ``targets``; each pass has two, for the loss and for the target class."""

        def targets(self, batch: dict[str, Tensor]) -> Tensor:
            calls_left[0] -= 1
            if calls_left[0] == 0:
                raise BoomError
            return super().targets(batch)

    for failing in range(1, 6):
        calls_left = [failing]
        model, batch = head("bert"), texts()
        Classification()(model, batch).mean().backward()
        weights, before = [p.detach().clone() for p in model.parameters()], grads(model)
        with pytest.raises(BoomError):
            method().backward(model, batch, Explosive())
        assert all(p.equal(q) for p, q in zip(model.parameters(), weights, strict=True))
        assert all(g.equal(before[n]) for n, g in grads(model).items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_randomness_is_that_of_plain_training() -> None:
    model, batch = head("bert"), texts()
    torch.manual_seed(1)
    Classification()(model, batch)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    method(target="sampled").backward(model, batch, Classification())
    assert torch.rand(3).equal(wanted)


@pytest.mark.parametrize("scale", [2.0**12, torch.amp.GradScaler("cpu", init_scale=2.0**12)])
def test_scaling_the_loss_scales_the_gradient(scale) -> None:
    results = []
    for factor in (1.0, scale):
        model = head("bert")
        torch.manual_seed(1)
        step = method().backward(model, texts(), Classification(), scale=factor)
        results.append((grads(model), step.grad_norm))
    assert relative_error({n: g / 2.0**12 for n, g in results[1][0].items()}, results[0][0]) < 1e-5
    torch.testing.assert_close(results[0][1], results[1][1])


def test_a_checkpoint_continues_exactly() -> None:
    def train(model: nn.Module, method: Method, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for i in range(steps):
            method.backward(model, texts(seed=method.steps + i), Classification())
            optimizer.step()
            optimizer.zero_grad()

    model, first = head("bert"), method(target="sampled")
    train(model, first, 3)
    state, weights, rng = (
        first.state_dict(),
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.get_rng_state(),
    )
    assert state["confusion"].sum() > 0
    train(model, first, 2)
    other, second = head("bert"), method(target="sampled")
    other.load_state_dict(weights)
    second.load_state_dict(state)
    torch.set_rng_state(rng)
    train(other, second, 2)
    assert all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert second.state["confusion"].equal(first.state["confusion"])


def test_the_adversary_makes_the_target_likelier() -> None:
    model, batch = head("bert").eval(), texts(n=8)
    for p in model.parameters():
        p.data.mul_(3)
    seen = []

    class Watching(Classification):
        def losses(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            seen.append(outputs.detach().softmax(-1))
            return super().losses(outputs, batch)

    aimed = TAT(adv_steps=3, adv_lr=1.0, init_magnitude=0.0, max_norm=None)
    aimed.state["confusion"] = torch.tensor([[0.0, 0, 9], [9, 0, 0], [0, 9, 0]])
    aimed.backward(model, batch, Watching())
    target = torch.tensor([2, 0, 1])[batch["labels"]].unsqueeze(1)
    rise = seen[-1].gather(1, target) - seen[0].gather(1, target)
    assert (rise > 0).all()


def test_wrapped_objectives_and_the_decay_of_old_mistakes() -> None:
    model, batch = head("bert"), texts(n=8)
    faded = method(decay=0.5)
    first = faded.backward(model, batch, RDrop(Classification()))
    assert (first.forwards, first.backwards) == (3, 5)
    before = faded.state["confusion"].clone()
    faded.backward(model, batch, RDrop(Classification()))
    assert faded.state["confusion"].sum() <= 0.5 * before.sum() + 8
    assert faded.state["confusion"].diagonal().sum() == 0


@pytest.mark.parametrize(
    "objective", [SMART(Classification(), total_steps=9), VAT(Classification())], ids=["smart", "vat"]
)
def test_objectives_with_an_adversary(objective: Objective) -> None:
    model, batch = head("bert"), texts()
    step = method().backward(model, batch, objective)
    assert (step.forwards, step.backwards) == (3, 5)
    assert all(torch.isfinite(g).all() for g in grads(model).values())


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_grad_norm_is_that_of_the_first_ascent(scale: float) -> None:
    """Of the gradient of the mean loss, without the loss scale and the share of a pass."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 1)).double()
    ids, factors = torch.randint(9, (4, 2)), torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    delta = torch.zeros(4, 2, 4, dtype=torch.float64, requires_grad=True)
    losses = factors * model[2]((model[0](ids) + delta).flatten(1)).squeeze(-1) ** 2
    (gradient,) = torch.autograd.grad(losses.mean(), delta)
    method = FreeLB(adv_steps=3, init_magnitude=0.0, adv_lr=0.5, max_norm=None, embeddings="0")
    step = method.backward(model, ids, lambda model, ids: factors * model(ids).squeeze(-1) ** 2, scale=scale)
    torch.testing.assert_close(step.grad_norm, gradient.norm(), rtol=1e-10, atol=0)
    assert not step.skipped


def test_initial_noise_differs_between_steps_micro_batches_and_calls_of_the_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.words(ids) - self.words(ids)).square().sum((1, 2))  # zero without noise

    model, ids = Twice(), torch.randint(9, (3, 2))
    method = FreeLB(adv_steps=1, init_magnitude=1.0, embeddings="words")
    steps = [method.backward(model, MicroBatches([ids, ids]), lambda m, ids: m(ids)).losses for _ in range(2)]
    found = torch.cat(steps).tolist()
    assert min(found) > 0
    assert len(set(found)) == 12
