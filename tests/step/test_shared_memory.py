"""Two parameters that share memory (``b.data = a.data``) are refused: a move of one would move the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import adversarial_risk, line_slice
from deltasam.methods import ASAM, ERM, SAM, DeltaSAM, FreeLB, LookSAM, Method, PerInstanceSAM
from deltasam.per_instance import instance_gradient_norms
from deltasam.step.checks import require_apart
from deltasam.weighting import OwnGradient

METHODS: dict[str, Callable[[], Method]] = {
    "sam": SAM,
    "delta-sam": DeltaSAM,
    "own-gradient": lambda: DeltaSAM(weighting=OwnGradient()),
    "asam": ASAM,
    "look-sam": LookSAM,
    "low-rank": PerInstanceSAM,
    "loop": lambda: PerInstanceSAM(engine="loop"),
}


class Tied(nn.Module):
    """A table and a head, tied by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight.data = self.table.weight.data

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(ids))
        return y


def objective(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum(-1)


IDS = torch.arange(4)


def refused(method: Method, model: Tied, message: str) -> None:
    before = model.table.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        method.backward(model, IDS, objective)
    assert torch.equal(model.table.weight, before)
    assert torch.equal(model.head.weight, before)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_they_are_refused(make: Callable[[], Method]) -> None:
    message = r"'table.weight' and 'head.weight' share memory.*\.weight = .*\.data\.clone\(\).*params="
    refused(make(), Tied(), message)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_analysis_refuses_them_too(engine: str) -> None:
    with pytest.raises(ValueError, match="share memory"):
        adversarial_risk(Tied(), [IDS], objective, rho=0.1, engine=engine)
    with pytest.raises(ValueError, match="share memory"):
        instance_gradient_norms(Tied(), IDS, objective)


@pytest.mark.parametrize(
    "method",
    [ERM(), SAM(rho=0.0), FreeLB(embeddings="table"), SAM(params=lambda name, p: "weight" not in name)],
    ids=["erm", "rho=0", "freelb", "left out"],
)
def test_parameters_that_stay_at_w_may_share_memory(method: Method) -> None:
    model = Tied()
    model.head.bias = nn.Parameter(torch.zeros(5))
    method.backward(model, IDS, objective)
    assert model.table.weight.grad is not None


@pytest.mark.parametrize("left", ["table.weight", "head.weight"])
def test_an_excluded_one_would_be_moved_with_the_other(left: str) -> None:
    with pytest.raises(ValueError, match=r"share memory.*exclude both"):
        SAM(params=lambda name, p: name != left).backward(Tied(), IDS, objective)


@pytest.mark.parametrize("frozen", ["table.weight", "head.weight"])
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_a_frozen_one_would_be_moved_with_the_other(make: Callable[[], Method], frozen: str) -> None:
    """On a CPU the parameter gets other memory and the frozen one stays; on a GPU both would move."""
    model = Tied()
    model.get_parameter(frozen).requires_grad_(False)
    message = rf"'table.weight' and 'head.weight' share memory.*'{frozen}' is frozen.*\.data\.clone\(\).*params="
    refused(make(), model, message)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_frozen_one_in_the_analysis(engine: str) -> None:
    model = Tied()
    model.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen"):
        adversarial_risk(model, [IDS], objective, rho=0.1, engine=engine)
    with pytest.raises(ValueError, match="is frozen"):
        instance_gradient_norms(model, IDS, objective)
    with pytest.raises(ValueError, match="is frozen"):
        line_slice(model, [IDS], objective, [torch.ones(5, 3)], [0.1])


def test_the_low_rank_engine_checks_excluded_parameters_too() -> None:
    with pytest.raises(ValueError, match=r"share memory.*exclude both"):
        PerInstanceSAM(engine="low-rank", params=lambda name, p: name != "head.weight").backward(
            Tied(), IDS, objective
        )


def test_frozen_ones_may_share_memory_with_each_other() -> None:
    model = nn.Sequential(Tied().requires_grad_(False), nn.Linear(5, 5))
    for make in METHODS.values():
        make().backward(model, IDS, objective)


def test_tied_as_parameters_they_are_one() -> None:
    model = Tied()
    model.head.weight = model.table.weight
    SAM().backward(model, IDS, objective)


def test_views_into_one_buffer_that_do_not_overlap() -> None:
    """As in recurrent layers on a GPU and in flattening optimizers; some are interleaved, some empty."""
    flat = torch.randn(20)
    square = torch.randn(4, 4)
    kept = [flat[:8].view(2, 4), flat[8:12], flat[12:], square[:, ::2], square[:, 1::2], flat[:0], flat[:0]]
    meta = [torch.empty(3, device="meta") for _ in range(2)]
    params = {str(k): nn.Parameter(part) for k, part in enumerate((*kept, *meta))}
    require_apart(params.values(), params)


def test_a_view_that_begins_where_another_parameter_does() -> None:
    flat = torch.randn(20)
    params = {"whole": nn.Parameter(flat), "part": nn.Parameter(flat[:4].view(2, 2))}
    with pytest.raises(ValueError, match="'whole' and 'part'"):
        require_apart(params.values(), params)


def test_a_view_that_begins_elsewhere_in_another_parameter() -> None:
    """Also if another one is between them in memory, and if only one of the two is moved."""
    flat = torch.randn(20)
    views = {"first": flat[2:4], "last": flat[16:].view(2, 2), "whole": flat}
    params = {name: nn.Parameter(view) for name, view in views.items()}
    for moved in (["whole"], ["last"], ["last", "whole"]):
        with pytest.raises(ValueError, match=r"'(first|last)' and 'whole'"):
            require_apart([params[name] for name in moved], params)
    del params["whole"]
    require_apart(params.values(), params)


def test_one_whose_memory_was_freed() -> None:
    """As in sharded training: the remaining address means nothing."""
    one, other = (nn.Parameter(torch.randn(20)[4:]) for _ in range(2))
    for p in (one, other):
        p.untyped_storage().resize_(0)
    require_apart([one, other], {"one": one, "other": other})


def test_parameters_without_plain_memory_are_not_checked() -> None:
    """Sparse ones, for example, which have indices and values."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Parameter(torch.eye(3).to_sparse()), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.mix, self.head(x).T).T

    assert SAM().backward(Sparse(), torch.randn(4, 3), objective).perturbed_losses is not None
