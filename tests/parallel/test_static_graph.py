"""DDP's ``static_graph=True``: steps whose passes are all synchronised work, others are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam import MicroBatches
from deltasam.integrations import MethodOptimizer
from deltasam.methods import ERM, GSAM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.per_instance.compiling.region import region_of
from helpers.problems import grads, relative_error


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    losses: Tensor = model(x).squeeze(-1).square()
    return losses


def of_two_steps(model: nn.Module, method: Method, batch: object) -> dict[str, Tensor]:
    for _ in range(2):
        model.zero_grad()
        method.backward(model, batch, objective)
    return grads(model.module if isinstance(model, DistributedDataParallel) else model)


@pytest.mark.parametrize("method", [ERM(), SAM(), DeltaSAM(), GSAM(), PerInstanceSAM()], ids=str)
def test_one_synchronised_pass(method: Method) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    found = of_two_steps(DistributedDataParallel(network(), static_graph=True), method, x)
    method.load_state_dict({})
    assert relative_error(found, of_two_steps(network(), method, x)) < 1e-10


def test_gradients_that_are_synchronised_at_the_end() -> None:
    parts = MicroBatches(torch.randn(2, 4, 3, dtype=torch.float64).unbind())
    found = of_two_steps(DistributedDataParallel(network(), static_graph=True), GSAM(), parts)
    assert relative_error(found, of_two_steps(network(), GSAM(), parts)) < 1e-10


@pytest.mark.parametrize("method", [ERM(), SAM(), PerInstanceSAM()], ids=str)
def test_micro_batches_are_refused(method: Method) -> None:
    model = DistributedDataParallel(network(), static_graph=True)
    with pytest.raises(ValueError, match=r"static_graph=True.*MicroBatches.*leave static_graph out"):
        method.backward(model, MicroBatches(torch.randn(2, 4, 3, dtype=torch.float64).unbind()), objective)


def test_parts_of_a_batch_are_refused_by_their_name() -> None:
    model = DistributedDataParallel(network(), static_graph=True)
    with pytest.raises(ValueError, match=r"at_once.*leave static_graph out"):
        PerInstanceSAM(at_once=2).backward(model, torch.randn(4, 3, dtype=torch.float64), objective)


def test_the_loop_is_refused() -> None:
    model = DistributedDataParallel(network(), static_graph=True)
    with pytest.raises(ValueError, match=r"PerInstanceSAM's loop need: leave static_graph out"):
        PerInstanceSAM(engine="loop").backward(model, torch.randn(4, 3, dtype=torch.float64), objective)


def by_closure(model: nn.Module, method: Method, x: Tensor) -> dict[str, Tensor]:
    optimizer = MethodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), method, model)

    def closure() -> Tensor:
        loss = objective(model, x).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return grads(model.module if isinstance(model, DistributedDataParallel) else model)


@pytest.mark.parametrize("method", [ERM(), SAM(scope="global"), GSAM(scope="global")], ids=str)
def test_closures_whose_passes_are_all_synchronised(method: Method) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    found = by_closure(DistributedDataParallel(network(), static_graph=True), method, x)
    assert relative_error(found, by_closure(network(), method, x)) < 1e-10


@pytest.mark.parametrize("method", [SAM(), GSAM()], ids=str)
def test_closures_whose_ascent_is_not_synchronised_are_refused(method: Method) -> None:
    model = DistributedDataParallel(network(), static_graph=True)
    with pytest.raises(ValueError, match=r"static_graph=True.*scope='local' in a closure"):
        by_closure(model, method, torch.randn(4, 3, dtype=torch.float64))


def test_a_compiled_wrapper_is_mentioned_once() -> None:
    """Per-instance passes call the model inside DDP, which is not compiled if DDP was."""
    x, method = torch.randn(4, 3, dtype=torch.float64), PerInstanceSAM()
    wrapped: nn.Module = torch.compile(DistributedDataParallel(network()), backend="eager")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"run uncompiled: DistributedDataParallel was compiled"):
        method.backward(wrapped, x, objective)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.backward(wrapped, x, objective)
        inside = DistributedDataParallel(torch.compile(network(), backend="aot_eager"))  # type: ignore[arg-type]
        method.backward(inside, x, objective)


def test_compiled_shards_are_mentioned_once() -> None:
    model: nn.Module = torch.compile(network(), backend="eager")  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="fully_shard"):
        assert region_of(model, sharded=True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert region_of(model, sharded=True) is None
