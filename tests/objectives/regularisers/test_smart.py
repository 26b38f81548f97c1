"""SMART: the ball holds, the teacher follows on schedule and survives a checkpoint, and no_grad changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from deltasam import ERM, R3F, SAM, SMART, VAT, Classification, Objective, Regression
from helpers.heads import head, no_dropout, texts


def watched(objective: Objective, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The losses, and the noise on the embeddings in every pass."""
    clean = model.get_input_embeddings()(batch["input_ids"]).detach()
    added = []

    class Watching(Classification):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            layer = model.get_input_embeddings()
            handle = layer.register_forward_hook(lambda m, a, out: added.append(out.detach() - clean))
            try:
                return super().forward(model, batch)
            finally:
                handle.remove()

    object.__setattr__(objective, "objective", Watching())
    return objective(model, batch), added


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("sigma", [1e-5, 1.0])
def test_the_noise_stays_in_the_ball(norm: str, sigma: float) -> None:
    model, batch = no_dropout(head("bert")).double(), texts()
    smart = SMART(Classification(), mu=0.0, epsilon=1e-5, sigma=sigma, eta=1e-3, steps=3, norm=norm)
    _, added = watched(smart, model, batch)
    assert len(added) == 5  # clean, three for the gradient, the adversarial one
    real = batch["attention_mask"].bool()
    for delta in added[1:]:
        size = delta.abs().amax((1, 2)) if norm == "linf" else delta.flatten(1).norm(dim=1)
        assert (size <= 1e-5 * (1 + 1e-9)).all()
        assert (size > 0).all()
        assert (delta[~real] == 0).all()


def test_public_code_leaves_the_ball_and_ours_does_not() -> None:
    smart_pytorch = pytest.importorskip("smart_pytorch")
    model, batch = no_dropout(head("bert")).eval(), texts()
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    seen = []

    def evaluate(embeddings: Tensor) -> Tensor:
        seen.append((embeddings - embedded).detach())
        return model(inputs_embeds=embeddings, attention_mask=batch["attention_mask"]).logits

    loss = smart_pytorch.SMARTLoss(evaluate, smart_pytorch.kl_loss, epsilon=1e-6)
    loss(embedded, evaluate(embedded).detach())
    theirs = seen[-1].norm() / embedded.norm()
    _, added = watched(SMART(Classification(), mu=0.0), model, batch)
    ours = added[-1].norm() / embedded.norm()
    assert theirs > 10
    assert ours < 1e-2


def test_the_ascent_raises_the_divergence() -> None:
    model, batch = no_dropout(head("bert")).double(), texts()
    for p in model.parameters():
        p.data.mul_(3)
    gains = []
    for eta in (0.0, 0.1):
        torch.manual_seed(1)
        smart = SMART(Classification(), mu=0.0, epsilon=0.1, sigma=0.02, eta=eta, steps=2)
        gains.append(smart(model, batch) - Classification()(model, batch))
    assert (gains[1] > 2 * gains[0]).all()


@pytest.mark.parametrize("make", [lambda: SMART(Classification(), total_steps=10), lambda: VAT(Classification())])
def test_losses_are_the_same_under_no_grad(make) -> None:
    """delta-SAM's probes call the objective without a graph; the inner ascent still needs one."""
    model, batch = head("bert"), texts()
    objective = make()
    objective.prepare(model)
    torch.manual_seed(1)
    wanted = objective(model, batch)
    torch.manual_seed(1)
    with torch.no_grad():
        found = objective(model, batch)
    assert found.equal(wanted)
    assert wanted.requires_grad
    assert not found.requires_grad
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("make", [lambda o: SMART(o, mu=0.0), VAT])
def test_a_gradient_that_is_not_finite_gives_finite_losses(make) -> None:
    model, batch = no_dropout(head("bert")), texts()

    class Explosive(Classification):
        def divergence(self, first: Tensor, second: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return super().divergence(first, second, batch) * (1 if second.grad_fn is None else _Inf.apply(second))

        directed = divergence

    losses = make(Explosive())(model, batch)
    assert torch.isfinite(losses).all()


class _Inf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        ctx.shape = value.shape
        return torch.ones(())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.full(ctx.shape, torch.inf)


def test_the_teacher_follows_on_schedule() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    smart = SMART(Classification(), total_steps=30, embeddings="")
    smart.prepare(model)
    wanted = model.weight.detach().clone()
    for t in range(6):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        smart.prepare(model)
        beta = 0.99 if t < 3 else 0.999
        wanted = beta * wanted + (1 - beta) * model.weight.detach()
        torch.testing.assert_close(smart.teacher.model_like(model).weight, wanted, rtol=1e-12, atol=0)
    assert smart.state_dict()["updates"] == 6


def test_the_teacher_is_a_separate_model() -> None:
    model, batch = head("bert"), texts()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    smart = SMART(Classification(), total_steps=10)
    ERM().backward(model, batch, smart)
    teacher = smart.teacher.model_like(model)
    shared = {n for n, p in model.named_parameters() if p is dict(teacher.named_parameters())[n]}
    assert shared == {"bert.embeddings.position_embeddings.weight"}
    assert "bert.embeddings.position_embeddings.weight" not in smart.state_dict()["teacher"]
    assert teacher.training
    assert not smart.teacher.model_like(model.eval()).training
    assert all(p.grad is None for p in teacher.parameters())


def test_the_proximal_term_is_zero_where_the_teacher_is() -> None:
    """Also with dropout: all passes share their masks, so they differ by the weights only."""
    model, batch = head("bert"), texts()
    losses = []
    for mu in (0.0, 100.0):
        smart = SMART(Classification(), mu=mu, total_steps=10)
        smart.prepare(model)
        torch.manual_seed(1)
        losses.append(smart(model, batch))
    torch.testing.assert_close(losses[0], losses[1])
    with torch.no_grad():
        model.classifier.bias.add_(torch.tensor([1.0, 0.0, -1.0]))
    assert (smart(model, batch) - Classification()(model, batch)).min() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_continues_exactly(dtype: torch.dtype) -> None:
    def train(model: nn.Module, smart: SMART, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            ERM().backward(model, texts(), smart)
            optimizer.step()
            optimizer.zero_grad()

    model, smart = head("bert").to(dtype), SMART(Classification(), total_steps=20)
    assert smart.state_dict() == {}
    train(model, smart, 3)
    state, weights, rng = copy.deepcopy(smart.state_dict()), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert all(value.dtype == torch.float32 for value in state["teacher"].values())
    train(model, smart, 2)

    other, resumed = head("bert").to(dtype), SMART(Classification(), total_steps=20)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["updates"] == 2
    torch.set_rng_state(rng)
    train(other, resumed, 2)
    assert all(p.equal(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    for name, value in smart.state_dict()["teacher"].items():
        assert value.equal(resumed.state_dict()["teacher"][name])


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="total_steps="):
        SMART(Classification())
    with pytest.raises(ValueError, match="epsilon"):
        SMART(Classification(), mu=0.0, epsilon=-1.0)
    for steps in (0.5, -1, True, "2"):
        with pytest.raises(ValueError, match=rf"SMART\(steps={steps!r}\).*whole number"):
            SMART(Classification(), mu=0.0, steps=steps)
    for total in (0, 2.5):
        with pytest.raises(ValueError, match=rf"SMART\(total_steps={total!r}\).*whole number"):
            SMART(Classification(), total_steps=total)
    with pytest.raises(ValueError, match=r"VAT\(steps=1.5\).*whole number"):
        VAT(Classification(), steps=1.5)
    with pytest.raises(ValueError, match=r"R3F\(lam='1'\)"):
        R3F(Classification(), lam="1")
    with pytest.raises(ValueError, match="norm"):
        SMART(Classification(), mu=0.0, norm="l1")
    with pytest.raises(RuntimeError, match="prepare"):
        SMART(Regression(), total_steps=5)(head("bert", num_labels=1), texts(classes=1))
    with pytest.raises(TypeError, match="Objective"):
        SMART(lambda model, batch: None, mu=0.0)
    smart = SMART(Classification(), total_steps=5, embeddings="")
    smart.load_state_dict({"updates": 3, "teacher": {"other": torch.zeros(3)}})
    with pytest.raises(ValueError, match="another model"):
        smart.prepare(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no state"):
        SMART(Classification(), mu=0.0).load_state_dict({"updates": 3})


def test_training_does_not_change_the_loaded_state() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
    first, second = (SMART(Classification(), total_steps=10, embeddings="0") for _ in range(2))
    ERM().backward(model, batch, first)
    saved = first.state_dict()
    before = {name: value.clone() for name, value in saved["teacher"].items()}
    second.load_state_dict(saved)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    ERM().backward(model, batch, second)
    assert all(torch.equal(saved["teacher"][name], value) for name, value in before.items())
    assert not torch.equal(second.state_dict()["teacher"]["2.weight"], before["2.weight"])


def unfrozen_later(*, reload: bool) -> tuple[nn.Module, SMART, list[torch.Tensor]]:
    """A model whose embeddings are unfrozen in the third of four steps; returns their values at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
    smart, values = SMART(Classification(), total_steps=100, embeddings="0", beta=0.5), []
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        if step == 3 and reload:
            saved = smart.state_dict()
            smart = SMART(Classification(), total_steps=100, embeddings="0", beta=0.5)
            smart.load_state_dict(saved)
        values.append(model[0].weight.detach().clone())
        SAM(rho=0.1).backward(model, batch, smart)
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.requires_grad):
                p.add_(torch.randn_like(p))
    return model, smart, values


@pytest.mark.parametrize("reload", [False, True])
def test_parameters_that_are_unfrozen_later_get_an_average(reload: bool) -> None:
    model, smart, values = unfrozen_later(reload=reload)
    assert torch.equal(values[1], values[2])
    teacher = smart.teacher.model_like(model)
    assert torch.allclose(teacher[0].weight, 0.5 * (values[2] + values[3]))
    assert teacher[0].weight is not model[0].weight
    model[0].requires_grad_(False)  # frozen parameters keep their average
    smart.prepare(model)
    assert torch.allclose(teacher[0].weight, 0.25 * (values[2] + values[3]) + 0.5 * model[0].weight)
    assert smart.teacher.model_like(model) is teacher


def test_a_checkpoint_from_before_parameters_were_unfrozen() -> None:
    model, smart, _ = unfrozen_later(reload=False)
    saved = smart.state_dict()
    del saved["teacher"]["0.weight"]
    smart.load_state_dict(saved)
    smart.prepare(model)
    assert torch.equal(smart.teacher.model_like(model)[0].weight, model[0].weight)
