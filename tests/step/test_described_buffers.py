"""Buffers that a pass replaces together with the attributes that describe them, such as a cache and its length."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import CausalLM, MicroBatches
from deltasam.methods import ERM, ESAM, SAM, DeltaSAM, Method, PerInstanceSAM, RandomPerturbation, SubsetSAM
from deltasam.speed.splitting import Splitting
from deltasam.step.model_buffers import ModelBuffers
from deltasam.weighting import OwnGradient

TINY = 1e-9
METHODS: dict[str, Callable[[], Any]] = {
    "sam": lambda: SAM(rho=TINY),
    "random": lambda: RandomPerturbation(rho=TINY),
    "delta-sam": lambda: DeltaSAM(rho=TINY),
    "own-gradient": lambda: DeltaSAM(rho=TINY, weighting=OwnGradient()),
    "subset": lambda: SubsetSAM(rho=TINY),
    "esam": lambda: ESAM(rho=TINY, gamma=1.0),
    "low-rank": lambda: PerInstanceSAM(rho=TINY, engine="low-rank"),
    "loop": lambda: PerInstanceSAM(rho=TINY, engine="loop"),
    "splitting": lambda: Splitting(SAM(rho=TINY)),
}
each_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())


class Cache(nn.Module):
    """As in many models with code of their own: it grows with the texts, and does not shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(4)

    def grow(self, size: int) -> None:
        self.size, self.device_of, self.plain = size, torch.device("cpu"), torch.full((2,), float(size))
        self.register_buffer("held", torch.linspace(0, 1, size).double().view(-1, 1) + size, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.size:
            self.grow(x.shape[1])
        held: Tensor = self.held
        return held[: x.shape[1]] + self.plain[0]


class Adding(Cache):
    """Adds a second buffer, and attributes, for texts that are long."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4 and "long" not in self._buffers:
            self.register_buffer("long", torch.zeros(()).double())
            self.used = 0
        if "long" in self._buffers:
            self.long = self.long + 1
            self.used += 1
            return super().forward(x) + self.long + self.used
        return super().forward(x)


class Removing(Cache):
    """Keeps its buffer as an attribute from the first long text on."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 4 and "held" in self._buffers:
            self.grow(8)
            held = self.held
            del self.held
            self.held = held * 2
        return super().forward(x)


class Initialised(Cache):
    """Writes to its buffer in place once, and notes that in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(9)
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.held.copy_(torch.full_like(self.held, float(x.shape[1])))
            self.is_set = True
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, kind: type[Cache]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.cache, self.out = nn.Embedding(9, 6), kind(), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        logits: Tensor = self.out((words * self.cache(words)).sum(1))
        return logits


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch(length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(9, (4, length), generator=torch.Generator().manual_seed(length)), torch.tensor([0, 1, 2, 0])


def held(model: nn.Module) -> list[dict[str, Any]]:
    """The buffers of every module, and what else it holds besides objects."""
    kinds = (Tensor, int, float, str, torch.device, type(None))
    everything = [{**m._buffers, **vars(m)} for m in model.modules()]
    shown = [{name: v for name, v in each.items() if isinstance(v, kinds)} for each in everything]
    return [{n: v.tolist() if isinstance(v, Tensor) else v for n, v in each.items()} for each in shown]


def assert_trains_like_plain(model: nn.Module, method: Any, batches: list[Any], objective: Any) -> None:
    plain = deepcopy(model)
    for given in batches:
        wanted = ERM().backward(plain, given, objective)
        step = method.backward(model, given, objective)
        for loss in (*step.losses, *step.perturbed_losses):  # for some methods, of some instances
            assert float((wanted.losses - loss).abs().min()) < 1e-6
        assert held(model) == held(plain)
    with torch.no_grad():
        torch.testing.assert_close(objective(model, batches[0]), objective(plain, batches[0]))


@pytest.mark.filterwarnings("ignore:.*one after the other")
@pytest.mark.parametrize("kind", [Cache, Adding, Removing, Initialised])
@each_method
def test_a_cache_of_own_code(make: Callable[[], Any], kind: type[Cache]) -> None:
    assert_trains_like_plain(Net(kind), make(), [batch(n) for n in (4, 6, 6, 3, 8)], objective)


@pytest.mark.parametrize("name", ["sam", "delta-sam", "loop", "splitting"])
def test_micro_batches_of_different_lengths(name: str) -> None:
    batches = [batch(4), MicroBatches([batch(5), batch(7), batch(3)])]
    model, plain, method = Net(Cache), Net(Cache), METHODS[name]()
    for given in batches:
        wanted, step = ERM().backward(plain, given, objective), method.backward(model, given, objective)
        torch.testing.assert_close(step.losses, wanted.losses)
        assert held(model) == held(plain)


@pytest.mark.filterwarnings("ignore:.*one after the other")
@each_method
def test_dynamic_rotary_embeddings(make: Callable[[], Any]) -> None:
    transformers = pytest.importorskip("transformers", "5.0")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    more = {"vocab_size": 31, "max_position_embeddings": 8, "initializer_range": 0.5, "rope_parameters": rope}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).double()
    texts = [torch.randint(3, 31, (3, n), generator=torch.Generator().manual_seed(n)) for n in (24, 12, 32, 6)]
    batches = [{"input_ids": ids, "labels": ids} for ids in texts]
    assert_trains_like_plain(model, make(), batches, CausalLM())


def test_attributes_beside_buffers_that_a_pass_leaves_are_its_own() -> None:
    """A count of passes, for instance."""

    class Counting(Cache):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Net(Counting)
    SAM().backward(model, batch(4), objective)
    assert model.cache.calls == 2


def test_restoring_gives_back_attributes_and_takes_away_what_was_added() -> None:
    for kind in (Cache, Adding, Removing, Initialised):
        model = Net(kind)
        before, own = held(model), list(model.buffers())
        buffers = ModelBuffers(model)
        model(batch(6)[0])
        buffers.restore()
        assert held(model) == before
        assert all(a is b for a, b in zip(model.buffers(), own, strict=True))


def test_a_pass_that_fails_leaves_a_cache_that_fits() -> None:
    for kind in (Cache, Adding, Removing, Initialised):
        model = Net(kind)
        before = held(model)
        with suppress(ZeroDivisionError), ModelBuffers(model).rewound():
            model(batch(6)[0])
            raise ZeroDivisionError
        assert held(model) == before


@pytest.mark.parametrize("method", [SAM(rho=TINY), DeltaSAM(rho=TINY)], ids=str)
def test_the_graph_of_an_earlier_step_is_not_kept(method: Method) -> None:
    class Storing(Cache):
        found: Any = None

        def forward(self, x: Tensor) -> Tensor:
            before = weakref.ref(self.found) if self.found is not None and self.found.requires_grad else None
            self.found = x * 2
            is_freed.append(before is None or before() is None)
            return super().forward(x)

    is_freed: list[bool] = []
    model = Net(Storing)
    for _ in range(2):
        method.backward(model, batch(4), objective)
    assert all(is_freed)
