"""Shards with ``set_requires_gradient_sync(False)``, as for accumulation: a step exchanges gradients anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deltasam._torch import fsdp_parameter_groups
from deltasam.methods import ERM, GSAM, SAM, DeltaSAM, Method, PerInstanceSAM
from deltasam.weighting import LossWeights
from helpers.problems import grads, relative_error
from helpers.rank_blocks import CAN_SHARD

pytestmark = pytest.mark.skipif(not CAN_SHARD, reason="this version of torch cannot shard a model on a CPU")

METHODS: dict[str, Callable[[], Method]] = {
    "erm": ERM,
    "sam": lambda: SAM(rho=0.1, scope="global"),
    "gathered": lambda: SAM(rho=0.1),
    "gsam": lambda: GSAM(rho=0.1, scope="global"),
    "delta-sam": lambda: DeltaSAM(rho=0.1, scope="global", weighting=LossWeights()),
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def objective(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1).square()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_gradients_that_wait_are_not_mixed_with_the_ascent(mesh: Any, make: Callable[[], Method]) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = network()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    alone, batches = network(), torch.randn(2, 5, 3).double()
    for k, batch in enumerate(batches):
        model.set_requires_gradient_sync(k == 1)  # accumulation with FSDP
        make().backward(model, batch, objective, scale=0.5)
        make().backward(alone, batch, objective, scale=0.5)
        found = {name: grad.full_tensor() for name, grad in grads(model).items()}
        assert len(found) == 4, "all are exchanged in every step"
        assert relative_error(found, grads(alone)) < 1e-12


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_fsdp_waits_for_the_gradients_of_every_pass(mesh: Any, make: Callable[[], Method]) -> None:
    """With ``set_is_last_backward(False)`` it does not: on a GPU the ascent would read unfinished gradients."""
    from torch.distributed.fsdp import fully_shard

    model: Any = network()
    finished = []
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    make().backward(model, torch.randn(5, 3).double(), objective)  # torch prepares the groups in the first pass
    (group,) = fsdp_parameter_groups(model)
    finish = group.finalize_backward
    group.finalize_backward = lambda: finished.append(finish())
    model.set_is_last_backward(False)
    step = make().backward(model, torch.randn(5, 3).double(), objective)
    assert len(finished) == step.backwards


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # our layers return views
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("method", [PerInstanceSAM(engine="loop"), PerInstanceSAM(at_once=2)], ids=["loop", "at-once"])
def test_a_step_that_fails_leaves_no_gradients_behind(mesh: Any, method: Method, halves: bool) -> None:
    """``zero_grad`` does not see those that FSDP holds back until the last part."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = network().float()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, **({"mp_policy": policy} if halves else {}))
    alone: Any = network().bfloat16() if halves else network().float()
    batch, calls = torch.randn(5, 3), []

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 4:  # the first part is done, the last one is not
            raise ValueError("in the fourth pass")
        return objective(model, x)

    with pytest.raises(ValueError, match="in the fourth pass"):
        method.backward(model, batch, fails)
    model.zero_grad()
    method.backward(model, batch, objective)
    method.backward(alone, batch.to(alone[0].weight.dtype), objective)
    found = {name: grad.full_tensor() for name, grad in grads(model).items()}
    wanted = {name: grad.float() for name, grad in grads(alone).items()}
    assert relative_error(found, wanted) < (0.05 if halves else 1e-5)
