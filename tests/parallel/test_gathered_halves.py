"""Float32 shards that are gathered or used in half precision: perturbations arrive, and imprecise probes warn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasam import SAM, measured_arrival
from deltasam.methods import DeltaSAM
from helpers.rank_blocks import CAN_SHARD

pytestmark = pytest.mark.skipif(not CAN_SHARD, reason="this version of torch cannot shard a model on a CPU")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).float().square()


@pytest.mark.parametrize("halves", [True, False])
def test_probes_of_shards_that_are_gathered_in_bfloat16(halves: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if halves else None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DeltaSAM(scope="global").backward(model, torch.randn(4, 3), objective)
    found = [str(each.message) for each in caught if "probe" in str(each.message)]
    assert len(found) == halves
    assert all("bfloat16" in message and "MixedPrecisionPolicy" in message for message in found)


@pytest.mark.parametrize("kind", ["gathered", "autocast"])
@pytest.mark.parametrize("scope", ["local", "global"])
def test_a_perturbation_of_shards_arrives(kind: str, scope: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())  # on the grid: without stochastic rounding most of the move would be lost
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if kind == "gathered" else None))
    method, shares = SAM(rho=2e-3, scope=scope), []
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"), measured_arrival():
            shares.append(float(method.backward(model, torch.randn(8, 64), objective).arrived))
    assert sum(shares) / 5 == pytest.approx(1, abs=0.12)
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
