"""Batches of any shape, cut and repeated by instances."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam import ERM, ESAM, SAM, Method, MicroBatches, PerInstanceSAM, SubsetSAM
from deltasam.speed.splitting import Splitting
from deltasam.step.batches import batch_size, portion, ratio, repeat, shares, take

TEXTS = {"text": ["a", "bb", "ccc", "dddd"], "labels": torch.tensor([0, 1, 2, 0]), "size": (224, 224, 3, 1)}


def lengths(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Gets texts, as an objective with a tokenizer inside does."""
    inputs = torch.tensor([[float(len(text)), 1.0] for text in batch["text"]])
    return cross_entropy(model(inputs), batch["labels"], reduction="none")


def test_texts_go_with_their_instances() -> None:
    some = take(TEXTS, torch.tensor([3, 1]), 4)
    assert some["text"] == ["dddd", "bb"]
    assert some["labels"].tolist() == [0, 1]
    assert some["size"] == (224, 224, 3, 1)  # not texts: these may or may not be instances
    assert take((["a", "b"], torch.arange(2)), torch.tensor([1]), 2)[0] == ["b"]
    assert repeat(TEXTS, 2, 4)["text"] == [*TEXTS["text"], *TEXTS["text"]]
    assert take({"text": ["one", "two"], "x": torch.zeros(3)}, torch.tensor([0]), 3)["text"] == ["one", "two"]


def test_labels_determine_the_number_of_instances() -> None:
    """The images of a batch may be in one tensor, several per instance."""
    patches = torch.zeros(6, 3)
    assert batch_size({"pixel_values": patches, "labels": torch.tensor([0, 1])}) == 2
    assert batch_size({"pixel_values": patches, "labels": torch.tensor(0.5)}) == 6  # a scalar has no instances
    assert batch_size({"pixel_values": patches}) == batch_size([torch.tensor(1.0), patches]) == 6
    assert batch_size({"text": ["a"]}) is None


class Pair(NamedTuple):
    x: Tensor
    inner: tuple[Tensor, str]


def test_named_tuples_stay_named_tuples() -> None:
    found = take(Pair(torch.arange(3), (torch.arange(3) * 10, "all")), torch.tensor([2, 0]), 3)
    assert isinstance(found, Pair)
    assert found.x.tolist() == [2, 0]
    assert found.inner[0].tolist() == [20, 0]
    assert found.inner[1] == "all"


def test_shares_add_up_and_are_zero_without_items() -> None:
    counts = [torch.tensor(n) for n in (1, 0, 2)]
    assert [float(share) for share in shares(counts)] == [1 / 3, 0.0, 2 / 3]  # in double precision
    assert [float(share) for share in shares([torch.tensor(0)] * 2)] == [0.0, 0.0]
    assert shares([1, 3]) == [0.25, 0.75]
    assert float(ratio(torch.tensor(0), torch.tensor(0))) == 0


class CountsSome:
    """Counts the items of some batches only: of those with more than one instance."""

    def items(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        return None if len(batch[1]) == 1 else 10 * batch[1].sum()

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_parts_are_weighted_by_instances_if_one_has_no_count() -> None:
    model = nn.Linear(2, 3).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    parts = MicroBatches([(x[:4], y[:4]), (x[4:], y[4:])])
    step = ERM().backward(model, parts, CountsSome())
    whole = cross_entropy(model(x), y)
    torch.testing.assert_close(step.loss, whole.detach())
    torch.testing.assert_close(model.weight.grad, torch.autograd.grad(whole, model.weight)[0])


@pytest.mark.parametrize("known", [[None, None], [3, None]], ids=["none", "one"])
def test_parts_without_any_count_are_refused(known: list[int | None]) -> None:
    with pytest.raises(ValueError, match=r"MicroBatches without tensors.*items\(batch\)"):
        shares(known)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_one_batch_instead_of_several_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"MicroBatches got one mapping \(with x, labels\).*MicroBatches\(\[first"):
        MicroBatches(kind({"x": torch.zeros(2, 3), "labels": torch.zeros(2)}))


@pytest.mark.parametrize("method", [SubsetSAM(), ESAM(gamma=0.5)], ids=lambda method: type(method).__name__)
def test_methods_that_take_a_part_of_a_batch_of_texts(method: Method) -> None:
    batch = {name: value for name, value in TEXTS.items() if name != "size"}
    assert method.backward(nn.Linear(2, 3), batch, lengths).backwards == 2


NO_ROWS = {
    "images": torch.zeros(5, 2), "numbers": [1.0, 2.0, 3.0, 4.0], "zipped": (224, 224, 3, 1),
    "boxes": [{"box": torch.zeros(1, 4)}] * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize(
    "method", [SubsetSAM(), ESAM(gamma=0.5), PerInstanceSAM(at_once=3)], ids=lambda method: type(method).__name__
)
def test_a_batch_without_one_row_per_instance_is_not_cut(method: Method, name: str) -> None:
    """An objective that pairs the losses with such a list would take the entries of the first instances."""
    batch = {"x": torch.randn(4, 2), "labels": torch.tensor([0, 1, 2, 0]), name: NO_ROWS[name]}
    model = nn.Linear(2, 3)

    def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    with pytest.raises(ValueError, match=r"batch of 4 instances has a (tensor|list) .*unsqueeze\(0\).*at_once"):
        method.backward(model, batch, losses)
    batch[name] = torch.zeros(1, 4)
    method.backward(model, batch, losses)


def test_a_batch_of_texts_is_split_when_memory_runs_out() -> None:
    def hungry(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        if len(batch["text"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return lengths(model, batch)

    batch = {name: value for name, value in TEXTS.items() if name != "size"}
    whole, split = nn.Linear(2, 3), nn.Linear(2, 3)
    split.load_state_dict(whole.state_dict())
    SAM().backward(whole, batch, lengths)
    assert Splitting(SAM()).backward(split, batch, hungry).losses.shape == (4,)
    torch.testing.assert_close(split.weight.grad, whole.weight.grad)


def test_the_portion_of_a_batch_is_not_rounded_up_by_a_rounding_error() -> None:
    assert 0.55 * 100 > 55
    assert [portion(0.55, 100), portion(0.55, 101), portion(0.25, 5), portion(1e-9, 5), portion(1.0, 7)] == [
        55,
        56,
        2,
        1,
        7,
    ]
    x = torch.randn(100, 2)
    step = SubsetSAM(fraction=0.55).backward(nn.Linear(2, 1), x, lambda model, x: model(x).squeeze(-1) ** 2)
    assert step.losses.shape == (55,)
