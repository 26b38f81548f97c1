"""The logic of capture without a GPU, with a fake graph: keys, eviction, fallback, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.methods import ASAM, SAM, DeltaSAM
from deltasam.objectives.regularisers import EmbeddingNoise
from deltasam.speed.capture import Captured, NotCapturableError, _captured
from deltasam.speed.capture._key import batch_key, model_key
from deltasam.speed.capture._streams import Needs
from helpers.problems import TRANSFORMER, grads, relative_error

FAILURE = "model.py:7 `x.item()` (operation not permitted)"


class PlayedStep:
    """A fake graph: gradients go to fixed memory, which they overwrite."""

    fail = False

    def __init__(self, run: Any, model: nn.Module, inputs: Any, needs: Needs, pool: Any, place: Any) -> None:
        if PlayedStep.fail:
            raise NotCapturableError(FAILURE)
        self.run, self.model, self.place, self.placed = run, model, place, []

    def replay(self, inputs: Any, steps: int) -> Any:
        params = dict(self.model.named_parameters())
        kept = {n: p.grad for n, p in params.items()}
        for p in params.values():
            p.grad = None
        step = self.run(inputs)
        for name, p in params.items():
            if p.grad is not None:
                self.place[name].copy_(p.grad)
            p.grad = kept[name]
        return step


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the CPU as a device with graphs."""
    monkeypatch.setattr(_captured, "RecordedStep", PlayedStep)
    monkeypatch.setattr(_captured, "Pool", SimpleNamespace)
    monkeypatch.setattr(_captured, "HAS_GRAPHS", ("cpu",))
    monkeypatch.setattr(PlayedStep, "fail", False)


def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PlayedStep.__init__

    def remember(self: PlayedStep, run: Any, model: nn.Module, *rest: Any) -> None:
        original(self, run, model, *rest)
        self.placed = [n for n, p in model.named_parameters() if p.requires_grad and "unused" not in n]

    monkeypatch.setattr(PlayedStep, "__init__", remember)


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


def test_on_the_cpu_it_is_the_method(recwarn: pytest.WarningsRecorder) -> None:
    results = []
    for wrap in (lambda m: m, Captured):
        model, batch, objective = TRANSFORMER.make()
        method = wrap(DeltaSAM())
        torch.manual_seed(3)
        for _ in range(3):
            method.backward(model, batch, objective)
        results.append((grads(model), method.steps, method.rho))
    assert relative_error(results[0][0], results[1][0]) == 0
    assert results[0][1:] == results[1][1:] == (3, 0.01)
    assert not recwarn.list


@pytest.mark.usefixtures("on_gpu")
def test_first_ordinary_then_recorded_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch)
    model, batch, objective = TRANSFORMER.make()
    reference, _, _ = TRANSFORMER.make()
    captured, method = Captured(SAM()), SAM()
    for step in range(4):
        for m, model_ in ((captured, model), (method, reference)):
            torch.manual_seed(step)
            model_.zero_grad()
            m.backward(model_, batch, objective)
        assert relative_error(grads(model), grads(reference)) < 1e-15
    assert (captured.report.ordinary, captured.report.recorded, captured.report.replayed) == (1, 1, 3)
    assert captured.steps == 4


@pytest.mark.usefixtures("on_gpu")
def test_another_hyperparameter_is_another_recording() -> None:
    model = nn.Linear(2, 1)
    captured = Captured(ASAM(eta=0.05))
    for _ in range(3):
        captured.backward(model, torch.ones(4, 2), objective)
    captured.method = captured.method.replace(eta=0.1)
    captured.backward(model, torch.ones(4, 2), objective)
    assert (captured.report.ordinary, captured.report.recorded) == (2, 1)
    captured.method = captured.method.replace(eta=0.05)
    captured.backward(model, torch.ones(4, 2), objective)
    assert (captured.report.ordinary, captured.report.replayed) == (2, 3)


@pytest.mark.usefixtures("on_gpu")
def test_a_method_that_cannot_be_hashed_is_compared_by_identity() -> None:
    @dataclass  # not frozen, so without a hash
    class Only:
        names: list[str]

        def __call__(self, name: str, p: nn.Parameter) -> bool:
            return name in self.names

    model = nn.Linear(2, 1)
    captured = Captured(SAM(params=Only(["weight"])))
    for _ in range(3):
        captured.backward(model, torch.ones(4, 2), objective)
    captured.method = SAM(params=Only(["weight"]))
    captured.backward(model, torch.ones(4, 2), objective)
    assert (captured.report.ordinary, captured.report.recorded, captured.report.replayed) == (2, 1, 2)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_ordinary_and_replayed_steps(monkeypatch: pytest.MonkeyPatch, to_none: bool) -> None:
    placed(monkeypatch)
    model, batch, objective = TRANSFORMER.make()
    reference, _, _ = TRANSFORMER.make()
    captured, method = Captured(SAM()), SAM()
    for _ in range(3):
        for m, model_ in ((captured, model), (method, reference)):
            model_.zero_grad(set_to_none=to_none)
            for micro in range(3):
                torch.manual_seed(micro)
                m.backward(model_, batch, objective, scale=1 / 3)
        assert relative_error(grads(model), grads(reference)) < 1e-14


@pytest.mark.usefixtures("on_gpu")
def test_models_with_the_same_names_do_not_share_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch)
    captured, x = Captured(SAM()), torch.randn(4, 3)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    for _ in range(3):
        for model in models:
            model.zero_grad()
            captured.backward(model, x, objective)
    for model in models:
        found = grads(model)
        model.zero_grad()
        SAM().backward(model, x, objective)
        assert relative_error(found, grads(model)) < 1e-6
    assert captured.report.replayed == 4


@pytest.mark.usefixtures("on_gpu")
def test_a_parameter_unfrozen_later_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch)
    model, captured, x = nn.Linear(3, 1), Captured(SAM()), torch.randn(4, 3)
    model.bias.requires_grad_(False)
    for _ in range(2):
        captured.backward(model, x, objective)
    model.bias.requires_grad_(True)
    for _ in range(2):
        model.zero_grad()
        captured.backward(model, x, objective)
    assert model.bias.grad is not None
    assert captured.report.obstacles == {}


@pytest.mark.usefixtures("on_gpu")
def test_another_shape_mode_or_scale_is_another_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.1))
    captured = Captured(SAM())
    changes = [
        lambda: captured.backward(model, torch.ones(4, 3), objective),
        lambda: captured.backward(model, torch.ones(5, 3), objective),
        lambda: captured.backward(model.eval(), torch.ones(4, 3), objective),
        lambda: captured.backward(model.eval(), torch.ones(4, 3), objective, scale=2.0),
        lambda: captured.backward(model.eval(), torch.ones(4, 3), objective, scale=torch.tensor(2.0)),
    ]
    for known, change in enumerate(changes, start=1):
        change()
        assert len(captured._seen) == known
    with torch.autocast("cpu", dtype=torch.bfloat16):
        changes[2]()
    assert len(captured._seen) == len(changes) + 1
    model[0].bias.requires_grad_(False)
    changes[2]()
    assert len(captured._seen) == len(changes) + 2


@pytest.mark.usefixtures("on_gpu")
def test_the_least_recently_used_graph_is_evicted() -> None:
    model, captured = nn.Linear(3, 1), Captured(SAM(), max_graphs=2)
    for size in (4, 5, 4, 6):  # 5 is the least recently used one
        captured.backward(model, torch.ones(size, 3), objective)
    assert captured.report.evicted == 1
    ordinary = captured.report.ordinary
    captured.backward(model, torch.ones(4, 3), objective)
    assert captured.report.ordinary == ordinary
    captured.backward(model, torch.ones(5, 3), objective)
    assert captured.report.ordinary == ordinary + 1


@pytest.mark.usefixtures("on_gpu")
def test_a_step_that_cannot_be_recorded_is_ordinary_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedStep, "fail", True)
    model, captured = nn.Linear(3, 1), Captured(SAM())
    captured.backward(model, torch.ones(4, 3), objective)
    with pytest.warns(UserWarning, match=r"not captured.*x\.item\(\)"):
        captured.backward(model, torch.ones(4, 3), objective)
    captured.backward(model, torch.ones(4, 3), objective)  # warnings are errors here
    assert captured.report.obstacles == {FAILURE: 2}
    assert captured.steps == 3
    assert model.weight.grad is not None


@pytest.mark.usefixtures("on_gpu")
def test_methods_and_batches_that_cannot_be_recorded() -> None:
    class Different(SAM):
        capturable = False

    model = nn.Linear(3, 1)
    with pytest.warns(UserWarning, match="Different does not run the same operations"):
        Captured(Different()).backward(model, torch.ones(4, 3), objective)
    with pytest.warns(UserWarning, match="neither a tensor nor a plain value"):
        Captured(SAM()).backward(model, {"x": torch.ones(4, 3), "o": object()}, lambda m, b: objective(m, b["x"]))


class Weighed(nn.Module):
    """An objective with a weight, alone or together with the model that it holds."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.factor = model, nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.factor * objective(model, x)


@pytest.mark.usefixtures("on_gpu")
def test_weights_of_an_objective_get_their_gradients() -> None:
    """A recording writes only the gradients of the model."""
    model, captured, own = nn.Linear(3, 1), Captured(SAM()), Weighed()
    with pytest.warns(UserWarning, match=r"not captured.*objective=Weighed has trainable weights.*requires_grad_"):
        captured.backward(model, torch.ones(4, 3), own)
    for _ in range(2):
        captured.backward(model, torch.ones(4, 3), own)
    assert (captured.report.ordinary, captured.report.replayed) == (3, 0)
    assert own.factor.grad is not None
    with pytest.raises(NotCapturableError, match="Weighed"):
        captured._key(model, (torch.ones(4, 3), None), EmbeddingNoise(own), "backward", torch.device("cpu"))


@pytest.mark.usefixtures("on_gpu")
def test_an_objective_without_trainable_weights_is_recorded() -> None:
    model, captured = nn.Linear(3, 1), Captured(SAM())
    holding = Weighed(model)
    holding.factor.requires_grad_(False)
    for _ in range(3):
        captured.backward(model, torch.ones(4, 3), holding)
    assert captured.report.recorded == 1
    holding.factor.requires_grad_(True)  # from here on its gradient would be missing
    with pytest.warns(UserWarning, match="has trainable weights"):
        captured.backward(model, torch.ones(4, 3), holding)


@pytest.mark.usefixtures("on_gpu")
def test_steps_with_and_without_probes_are_two_graphs() -> None:
    model, captured = nn.Linear(3, 1), Captured(DeltaSAM(probe_every=3))
    for _ in range(6):
        captured.backward(model, torch.rand(4, 3), objective)
    assert len(captured._seen) == 2


def test_keys() -> None:
    assert batch_key({"a": torch.zeros(2, 3), "b": "x"}) == batch_key({"a": torch.ones(2, 3), "b": "x"})
    assert batch_key({"a": torch.zeros(2, 3)}) != batch_key({"a": torch.zeros(3, 2)})
    assert batch_key([torch.zeros(2)]) != batch_key((torch.zeros(2),))
    model = nn.Linear(2, 2)
    before = model_key(model)
    assert model_key(model) == before
    model.weight.data = model.weight.data.clone()
    assert model_key(model) != before


def test_needs_finds_draws_seeds_and_obstacles() -> None:
    model, batch, objective = TRANSFORMER.make()
    needs = Needs(torch.device("cpu"))
    from deltasam.step.randomness import observed

    with observed(needs):
        DeltaSAM().backward(model, batch, objective)
    assert needs.extras == [0, 0, 0]
    assert len(needs.seeds) == 1
    assert needs.obstacle is None
    with observed(needs):
        SAM(randomness="independent").backward(model, batch, objective)
    assert "independent" in str(needs.obstacle)


def test_bad_arguments() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="max_graphs=0"):
        Captured(SAM(), max_graphs=0)
    with pytest.raises(ValueError, match="needs an optimizer"):
        Captured(SAM(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match="capturable=True"):
        Captured(SAM(), optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="has no optimizer"):
        Captured(SAM()).step(model, torch.ones(4, 2), objective)


def test_a_whole_step_on_the_cpu() -> None:
    results = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = Captured(SAM(), optimizer=optimizer, max_grad_norm=0.01)
        for _ in range(3):
            if whole:
                captured.step(model, torch.ones(4, 3), objective)
            else:
                SAM().backward(model, torch.ones(4, 3), objective)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    assert torch.allclose(*results)


def test_the_key_of_a_model_contains_every_module_and_parameter() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(nn.Dropout(), shared), nn.LayerNorm(3))
    model.register_module("nothing", None)
    key = model_key(model)
    assert key == model_key(model)
    for module in model.modules():
        module.train(not module.training)
        assert model_key(model) != key
        module.train(not module.training)
    for p in model.parameters():
        p.requires_grad_(False)
        assert model_key(model) != key
        p.requires_grad_(True)
    assert model_key(model) == key
    shared.weight = nn.Parameter(shared.weight.data)  # the same memory
    assert model_key(model) != key
    key = model_key(model)
    model.add_module("more", nn.Linear(3, 3))
    assert model_key(model) != key


def test_a_replaced_parameter_gets_the_gradient(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch)
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    captured = Captured(SAM(rho=0.1))
    for _ in range(3):
        captured.backward(model, x, objective)
    old = model.weight
    model.weight = nn.Parameter(old.data)
    model.zero_grad()
    before = None if old.grad is None else old.grad.clone()
    for _ in range(3):
        model.zero_grad()
        captured.backward(model, x, objective)
    assert (captured.report.ordinary, captured.report.recorded) == (2, 2)
    found = model.weight.grad
    model.zero_grad()
    SAM(rho=0.1).backward(model, x, objective)
    assert found is not None
    torch.testing.assert_close(found, model.weight.grad)
    assert before is None or torch.equal(before, old.grad)


def test_a_group_of_parameters_may_be_empty() -> None:
    groups = [{"params": []}, {"params": list(nn.Linear(2, 1).parameters())}, {"params": [], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, capturable=True)
    Captured(SAM(), optimizer=optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [float(rate) for rate in rates] == pytest.approx([0.1, 0.1, 0.5])
    assert all(isinstance(rate, Tensor) for rate in rates)
