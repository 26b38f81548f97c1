"""Arguments by other names, calls as of ``loss.backward()`` and states of others are answered with the way out."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import Classification
from deltasam.lab.catalogue import METHODS
from deltasam.methods import ASAM, ESAM, GSAM, SAM, DeltaSAM, FisherSAM, FreeLB, LookSAM, Method

PACKAGE = [kind for kind in METHODS.values() if kind.__module__.startswith("deltasam.")]
methods = pytest.mark.parametrize("kind", PACKAGE, ids=lambda kind: kind.__name__)

# what people bring from other packages, for any method, and what the answer has to name
FOREIGN = {
    "adaptive": (True, "ASAM"),
    "base_optimizer": (torch.optim.SGD, "MethodOptimizer(optimizer, method, model)"),
    "optimizer": (None, "MethodOptimizer(optimizer, method, model)"),
    "lr": (0.1, "torch.optim.AdamW(model.parameters(), lr=0.1)"),
    "weight_decay": (0.01, "weight_decay=0.01"),
    "momentum": (0.9, "momentum=0.9"),
    "model": (nn.Linear(1, 1), "method.backward(model, batch, objective)"),
    "loss_fn": (None, "method.backward(model, batch, objective)"),
    "perturb_eps": (1e-12, "skipped"),
    "rho_scheduler": (None, "method.replace(rho="),
    "no_such_name": (1, "params, randomness, sharpness"),
}


@methods
def test_words_of_other_packages(kind: Any) -> None:
    for name, (value, told) in FOREIGN.items():
        with pytest.raises(TypeError) as caught:
            kind(**{name: value})
        words = str(caught.value)
        assert words.startswith(f"{kind.__name__} has no hyperparameter {name}="), words
        assert told in words


@methods
def test_slips_of_the_pen(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        slip = field.name[0] + field.name[1:3][::-1] + field.name[3:]
        if field.init and slip != field.name:
            with pytest.raises(TypeError, match=rf"{kind.__name__} has no hyperparameter {slip}=1; did you mean "):
                kind(**{slip: 1})


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (SAM, "roh", "did you mean rho?"),
        (SAM, "radius", "did you mean rho?"),
        (SAM, "epsilon", "did you mean rho?"),
        (SAM, "alpha", "GSAM and LookSAM have alpha"),
        (SAM, "eta", "DeltaSAM and ASAM have eta"),
        (ESAM, "eta", "DeltaSAM and ASAM have eta"),
        (ASAM, "adaptive", "ASAM is adaptive as it is"),
        (GSAM, "gsam_alpha", "did you mean alpha?"),
        (LookSAM, "frequency", "did you mean k?"),
        (FreeLB, "adv_init_mag", "did you mean init_magnitude?"),
        (FreeLB, "adv_max_norm", "did you mean max_norm?"),
        (FreeLB, "rho", "FreeLB perturbs embeddings: adv_lr, init_magnitude and max_norm say how far"),
        (FisherSAM, "sparsity", "keep=1 - sparsity"),
        (DeltaSAM, "samples", "weighting=FiniteDifference(samples=1)"),
    ],
)
def test_which_word_is_ours(kind: Any, name: str, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{name: 1})
    assert told in str(caught.value)


def test_changed_methods_are_told_the_same() -> None:
    for change in (lambda: SAM().replace(roh=0.1), lambda: dataclasses.replace(SAM(), roh=0.1)):
        with pytest.raises(TypeError, match=r"SAM has no hyperparameter roh=0\.1; did you mean rho\?"):
            change()


class Anything(SAM):
    """A method of a user's own that takes any keyword."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        object.__setattr__(self, "words", words)


def test_methods_of_ones_own_take_what_they_like() -> None:
    assert Anything(roh=1).words == {"roh": 1}  # type: ignore[attr-defined]


@methods
def test_calls_as_of_a_loss(kind: Any) -> None:
    method, model, loss = kind(), nn.Linear(2, 1), torch.ones((), requires_grad=True)
    lacking = {(loss,): "batch and objective", (): "model, batch and objective", (model, 1): "objective"}
    for args, lacks in lacking.items():
        with pytest.raises(TypeError) as caught:
            method.backward(*args)
        words = str(caught.value)
        assert words.startswith(f"{kind.__name__}.backward lacks {lacks}: "), words
        assert "method.backward(model, batch, objective)" in words
        assert "reduction='none'" in words
        assert ("in the place of loss.backward()" in words) == (args == (loss,))
    with pytest.raises(TypeError, match=r"lacks objective, and does not know criterion: "):
        method.backward(model, 1, criterion=nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match=r"model=tensor\(1\..* must be a torch\.nn\.Module; the order is backward"):
        method.backward(loss, 1, Classification())
    wanted = ["self", "model", "batch", "objective", "scale"]
    assert list(inspect.signature(kind.backward).parameters) == wanted
    assert inspect.signature(kind.backward).parameters["batch"].default is inspect.Parameter.empty


@methods
def test_scales_that_leave_no_gradient(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    for bad in (float("inf"), float("nan"), 0, 0.0, -1.0):
        with pytest.raises(ValueError, match=rf"scale={bad} must be a finite number greater than 0.*1 / steps"):
            kind().backward(model, torch.tensor([[1, 2]]), lambda model, x: model(x).sum(1), scale=bad)


@methods
def test_states_that_are_not_the_methods(kind: Any) -> None:
    method = kind()
    method.load_state_dict({"steps": 3, "skipped": torch.tensor(1)})
    with pytest.raises(ValueError, match=rf"state has 'a', which is not remembered by {kind.__name__}: .*state_dict"):
        method.load_state_dict({"steps": 4, "a": 1})
    assert (method.steps, method.skipped) == (3, 1), "what was there stays"
    for other in PACKAGE:
        for name in other.state_keys - kind.state_keys:
            with pytest.raises(ValueError, match=rf"state has '{name}', .*is that of {other.__name__}, not "):
                method.load_state_dict({"steps": 4, name: torch.zeros(1)})
    method.load_state_dict({})


@methods
def test_methods_know_their_own_states(kind: Any) -> None:
    assert "state_keys" in vars(kind), "say what it state_keys, frozenset() if nothing"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    x, y = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    method = kind(**({"embeddings": "0"} if issubclass(kind, FreeLB) else {}))
    method.backward(model, {"x": x, "labels": y}, objective)
    kind().load_state_dict(method.state_dict())
    assert {name.split(".")[0] for name in method.state} - {"steps", "skipped"} <= kind.state_keys


def test_a_method_of_ones_own_remembers_what_it_likes() -> None:
    class Own(SAM):
        pass

    method: Method = Own()
    method.load_state_dict({"a": 1})
    assert method.state_dict() == {"a": 1}
