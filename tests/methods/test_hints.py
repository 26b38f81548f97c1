"""Arguments that a method does not have raise an error that names the argument and what to write instead."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import Classification, methods
from deltasam.methods import ASAM, ERM, GSAM, SAM, DeltaSAM, FreeLB, LookSAM, Method, PerInstanceSAM, Step
from helpers.regulariser_rows import Directed

KINDS = [
    kind
    for name in methods.__all__
    if isinstance(kind := getattr(methods, name), type) and issubclass(kind, Method) and kind is not Method
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        (SAM, "roh", "did you mean rho?"),
        (SAM, "radius", "did you mean rho?"),
        (SAM, "sharpness", "did you mean scope?"),
        (SAM, "adaptive", "ASAM"),
        (ASAM, "base_optimizer", "MethodOptimizer(optimizer, method, model)"),
        (GSAM, "lr", "torch.optim"),
        (SAM, "loss_fn", "method.backward(model, batch, objective)"),
        (SAM, "rho_scheduler", "Scheduled("),
        (LookSAM, "frequency", "did you mean k?"),
        (FreeLB, "adv_max_norm", "did you mean max_norm?"),
        (DeltaSAM, "samples", "weighting=FiniteDifference(samples="),
        (SAM, "no_such_name", "params, randomness, scope, rho"),
    ],
)
def test_unknown_keywords(kind: Any, name: str, advice: str) -> None:
    for make in (kind, kind().replace, lambda **given: dataclasses.replace(kind(), **given)):
        with pytest.raises(TypeError, match=f"{kind.__name__} has no hyperparameter {name}=1") as caught:
            make(**{name: 1})
        assert advice in str(caught.value)


@kinds
def test_positional_arguments(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes keyword arguments only.*method\.backward\(model, "):
        kind(nn.Linear(2, 1).parameters())


@kinds
def test_backward_as_if_it_took_a_loss(kind: Any) -> None:
    method, model, loss = kind(), nn.Linear(2, 1), torch.ones((), requires_grad=True)
    for args, missing in {(loss,): "batch, objective", (): "model, batch, objective", (model, 1): "objective"}.items():
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.backward is missing {missing}: .*reduction='none'"):
            method.backward(*args)
    with pytest.raises(TypeError, match="missing objective"):
        method.backward(model, 1, criterion=nn.CrossEntropyLoss())
    with pytest.raises(TypeError, match=r"model=tensor\(1\..* must be a torch\.nn\.Module"):
        method.backward(loss, 1, Classification())
    assert list(inspect.signature(kind.backward).parameters) == ["self", "model", "batch", "objective", "scale"]


@dataclass(frozen=True, kw_only=True)
class Own(SAM):
    """A user's method."""

    factor: float = 1.0


class Plain(Own):
    """A class that is not a dataclass itself."""


@pytest.mark.parametrize("kind", [*KINDS, Own, Plain])
def test_assignments(kind: Any) -> None:
    method = kind()
    with pytest.raises(FrozenInstanceError, match=rf"{kind.__name__} is frozen.*replace\(randomness='independent'\)"):
        method.randomness = "independent"
    assert method == kind()
    with pytest.raises(AttributeError, match="cannot delete"):
        del method.randomness


def test_what_is_not_a_hyperparameter() -> None:
    with pytest.raises(FrozenInstanceError, match="ERM is frozen, cannot assign 'rho'"):
        ERM().rho = 0.1  # type: ignore[attr-defined]
    loose = Plain()
    loose.note = "as in Python"  # type: ignore[attr-defined]
    assert loose.note == "as in Python"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Positions(SAM):
    """A user's method with a positional hyperparameter."""

    factor: float = 1.0


class Written(ERM):
    """A user's method with its own ``__init__``."""

    def __init__(self, *names: str, **others: Any) -> None:
        super().__init__()
        object.__setattr__(self, "names", (*names, *others))


def test_classes_with_other_arguments_are_left_alone() -> None:
    assert Positions(2.0, rho=0.1).factor == 2.0
    assert Written("a", roh=1).names == ("a", "roh")  # type: ignore[attr-defined]


@kinds
def test_methods_are_copied_and_pickled(kind: Any) -> None:
    method = kind()
    for other in (copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method)), method.replace()):
        assert other == method
        assert hash(other) == hash(method)
    assert repr(method) == repr(kind())
    assert "state" not in repr(method)
    assert not inspect.isfunction(Method.__new__), "autodoc would take its signature for that of every method"


def test_abstract_and_incomplete_classes() -> None:
    class Forgets(Method):
        def _step(self, passes: Any) -> Step:  # type: ignore[return]
            passes.accumulate(keep_side_effects=True)

    with pytest.raises(TypeError, match="abstract"):
        Method()  # type: ignore[abstract]
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=r"Forgets\._step returned None.*make_step\(passes, losses\)"):
        Forgets().backward(model, model.weight.detach(), lambda model, x: model(x).squeeze(-1))


@kinds
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 0, -1.0])
def test_scales_that_leave_no_gradient(kind: Any, bad: float) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match=rf"scale={bad} must be a finite number greater than 0"):
        kind().backward(model, torch.tensor([[1, 2]]), lambda model, x: model(x).sum(1), scale=bad)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (SAM, {"rho": -1}), (SAM, {"rho": "a"}), (SAM, {"rho": True}), (SAM, {"rho": float("nan")}),
        (SAM, {"scope": "all"}), (SAM, {"randomness": "none"}), (Own, {"rho": -1}),
        (PerInstanceSAM, {"group": 0}), (PerInstanceSAM, {"engine": "fast"}), (PerInstanceSAM, {"uncovered": "x"}),
        (FreeLB, {"max_norm": 0}), (FreeLB, {"norm": "l1"}), (LookSAM, {"k": 1.5}), (DeltaSAM, {"eta": 0}),
        (DeltaSAM, {"seed": 0.5}),
    ],
)  # fmt: skip
def test_values_out_of_range(kind: Any, bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be "):
        kind(**bad)


def test_a_new_default_keeps_the_check() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Larger(SAM):
        rho: float = 0.5

    assert Larger().rho == 0.5
    with pytest.raises(ValueError, match="rho=-1 must be"):
        Larger(rho=-1)


def objective(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


@kinds
def test_states_of_others(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    batch = {"x": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 1])}
    method = kind(**({"embeddings": "0"} if hasattr(kind, "embeddings") else {}))
    if kind.needs_adapters:
        method = method.replace(params="trained")
    method.backward(model, batch, Directed(objective))  # TRAM compares probabilities
    state = method.state_dict()
    kind().load_state_dict(state)
    assert {name.split(".")[0] for name in state} - {"steps", "skipped"} <= set(kind.buffers)
    with pytest.raises(ValueError, match=rf"state has 'a', .*{kind.__name__}"):
        method.load_state_dict({"steps": 4, "a": 1})
    assert method.steps == 1, "a refused state changes nothing"
    for other in KINDS:
        for name in set(other.buffers) - set(kind.buffers):
            with pytest.raises(ValueError, match=rf"state has '{name}', which {kind.__name__}"):
                method.load_state_dict({name: torch.zeros(1)})
    method.load_state_dict({})
    assert method.steps == 0


def test_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="make_step"):
        finish = methods.finish
    assert finish is methods.make_step
    with pytest.warns(DeprecationWarning, match="is now called") as warned:

        class Former(SAM):
            passes = "3/2"
            remembers = frozenset({"average"})

            def is_plain(self) -> bool:
                return True

    assert len(warned) == 3
    assert (Former.cost, Former.buffers, Former().is_erm()) == ("3/2", {"average"}, True)


def test_a_users_class_without_buffers_keeps_what_it_likes() -> None:
    method = Own()
    method.load_state_dict({"a": 1})
    assert method.state_dict() == {"a": 1}
