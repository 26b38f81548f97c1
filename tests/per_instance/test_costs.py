"""The form of each layer: the one that costs less, within a bound on memory, and never many more FLOPs than SAM."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deltasam import SAM, Method, PerInstanceSAM
from deltasam.per_instance.algebra import gradient as _gradient
from deltasam.per_instance.algebra.costs import SHARE, Kept, Layer, Machine, choose, machine

CUDA = torch.device("cuda")
MACHINES = {
    "bf16": machine(CUDA, torch.bfloat16),
    "TF32": machine(CUDA, torch.float32, tf32=True),
    "float32": machine(CUDA, torch.float32),
    "CPU": machine(torch.device("cpu"), torch.float32),
}
BOTH: tuple[Kept, Kept] = ("low-rank", "written")
SHAPES = [
    Layer(groups, rows, inputs, outputs, 2, sharing, own)
    for groups, rows, (inputs, outputs), sharing, own in product(
        (1, 8, 32), (1, 64, 384, 1024), ((768, 768), (768, 3072), (3072, 768), (768, 2)), (1, 3), (True, False)
    )
]


@pytest.mark.parametrize("name", MACHINES)
def test_the_choice_is_the_faster_form(name: str) -> None:
    on = MACHINES[name]
    for layer, form in zip(SHAPES, choose((*SHAPES,), (on,) * len(SHAPES), 2**60), strict=True):
        assert layer.seconds(form, on) == min(layer.seconds(each, on) for each in BOTH)


def costs(layers: tuple[Layer, ...], forms: tuple[Kept, ...], on: Machine) -> tuple[int, float]:
    pairs = list(zip(layers, forms, strict=True))
    return sum(layer.kept(form) for layer, form in pairs), sum(layer.seconds(form, on) for layer, form in pairs)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_and_the_choice_is_near_the_best_within_it(name: str, seed: int) -> None:
    on = MACHINES[name]
    which = torch.randperm(len(SHAPES), generator=torch.Generator().manual_seed(seed))[:8].tolist()
    layers = tuple(SHAPES[k] for k in which)
    table = [costs(layers, forms, on) for forms in product(BOTH, repeat=len(layers))]
    least, largest = min(kept for kept, _ in table), max(kept for kept, _ in table)
    for part in (0.0, 0.3, 0.7, 1.0):
        most = int(least + part * (largest - least))
        forms = choose(layers, (on,) * len(layers), most)
        kept, seconds = costs(layers, forms, on)
        assert kept <= most
        best = min(time for other, time in table if other <= most)
        smallest = sum(x.seconds(min(BOTH, key=x.kept), on) for x in layers)
        assert best <= seconds <= max(best, smallest) * (1 + 1e-9)
        if part in (0.0, 1.0):
            assert seconds == pytest.approx(best)


def test_a_bound_that_is_too_small_gives_the_smallest_forms() -> None:
    on = (MACHINES["bf16"],) * len(SHAPES)
    for layer, form in zip(SHAPES, choose((*SHAPES,), on, 0), strict=True):
        assert layer.kept(form) == min(layer.kept(each) for each in BOTH)


def bert(groups: int, rows: int, itemsize: int) -> tuple[Layer, ...]:
    """The linear layers of one layer of BERT-base: query, key, value, output, and the two of the MLP."""
    shapes = [(768, 768, 3)] * 3 + [(768, 768, 1), (768, 3072, 1), (3072, 768, 1)]
    return tuple(Layer(groups, rows, i, o, itemsize, sharing) for i, o, sharing in shapes)


@pytest.mark.parametrize("rows", [32, 128, 256, 384, 512, 1024])
@pytest.mark.parametrize("name", MACHINES)
def test_by_default_no_more_than_a_share_is_kept(name: str, rows: int) -> None:
    layers = bert(8, rows, 2)
    forms = choose(layers, (MACHINES[name],) * 6)
    low_rank = sum(layer.kept("low-rank") for layer in layers)
    assert sum(layer.kept(form) for layer, form in zip(layers, forms, strict=True)) <= SHARE * low_rank


def test_frozen_weights_are_not_copied_by_default() -> None:
    layers = tuple(layer._replace(trained=False) for layer in bert(8, 256, 2))
    on = (MACHINES["bf16"],) * 6
    assert choose(layers, on) == ("low-rank",) * 6
    assert "written" in choose(layers, on, 2**60)


def test_the_forms_of_bert_base() -> None:
    """Short texts and many instances: low rank. Long ones: one matrix per instance."""
    for itemsize, on in ((2, MACHINES["bf16"]), (4, MACHINES["TF32"])):
        for groups, rows in ((16, 64), (32, 128), (128, 32)):
            assert choose(bert(groups, rows, itemsize), (on,) * 6) == ("low-rank",) * 6
        for groups, rows in ((8, 512), (16, 512), (8, 1024), (4, 1024)):
            assert choose(bert(groups, rows, itemsize), (on,) * 6) == ("written",) * 6


# -- FLOPs ------------------------------------------------------------------------------------------------------------


SMALLER = 8  # FLOPs of products and of attention scale with the third power of all sizes, so ratios stay the same


class Block(nn.Module):
    """A layer of BERT-base, smaller."""

    def __init__(self, width: int, inner: int, head: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(width, inner), nn.Linear(inner, width), head
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(2, (-1, self.head)).transpose(1, 2) for t in (self.query, self.key, self.value))
        mixed = ((q @ k.mT / self.head**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.output(mixed))
        return self.norms[1](x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, 768 // SMALLER), nn.Linear(768 // SMALLER, 2)
        self.blocks = nn.Sequential(*(Block(768 // SMALLER, 3072 // SMALLER, 64 // SMALLER) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids))[:, 0]).square().sum(1)


def flops(method: Method, length: int) -> int:
    """Of the second step: the first one compares with autograd."""
    model, ids = Encoder(), torch.randint(100, (2, length))

    def objective(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids)

    method.backward(model, ids, objective)
    counter = FlopCounterMode(display=False)
    with counter:
        method.backward(model, ids, objective)
    return counter.get_total_flops()


def ratio(monkeypatch: pytest.MonkeyPatch, name: str, length: int) -> float:
    """FLOPs of a step relative to SAM, with the forms that BERT-base gets for texts of this length on a GPU."""
    on, itemsize = MACHINES[name], {"bf16": 2, "TF32": 4}[name]

    def as_if_large(layers: tuple[Layer, ...], _: Any, most: int | None) -> tuple[Kept, ...]:
        large = (
            x._replace(
                rows=SMALLER * x.rows, inputs=SMALLER * x.inputs, outputs=SMALLER * x.outputs, itemsize=itemsize
            )
            for x in layers
        )
        return choose(tuple(large), (on,) * len(layers), most)

    monkeypatch.setattr(_gradient, "choose", as_if_large)
    return flops(PerInstanceSAM(), length // SMALLER) / flops(SAM(), length // SMALLER)


LENGTHS = [64, 128, 256, 384, 512, 1024]


@pytest.mark.parametrize("name", ["bf16", "TF32"])
def test_flops_relative_to_sam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {length: round(ratio(monkeypatch, name, length), 3) for length in LENGTHS}
    assert max(found.values()) <= 1.10
    assert found[64] < 0.95
    assert max(found[512], found[1024]) <= 1.02  # the products of SAM; the rest is the table of words
