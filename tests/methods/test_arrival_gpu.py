"""On a GPU the perturbation arrives: eager and captured, under autocast, with TF32, with half-precision weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import measured_arrival
from deltasam import methods as m
from deltasam.speed.capture import Captured
from deltasam.step import fused
from deltasam.step.float32 import rounded
from deltasam.step.rounding import add_rounded, nearest
from helpers.arrival import cosine, exact, made
from helpers.problems import grads
from helpers.promises import assert_intact, snapshot

pytestmark = pytest.mark.gpu

KINDS = ["bf16 autocast", "fp16 autocast", "tf32", "bf16 weights", "fp16 weights"]
METHODS = {
    m.SAM: 0.004, m.DeltaSAM: 0.004, m.ASAM: 0.05, m.GSAM: 0.004, m.LookSAM: 0.004, m.FisherSAM: 0.01,
    m.SubsetSAM: 0.004, m.ESAM: 0.004,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def setting(kind: str, model: nn.Module) -> AbstractContextManager[Any]:
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    dtype = torch.float16 if kind.startswith("fp16") else torch.bfloat16
    if kind.endswith("weights"):
        model.to(dtype)
    return torch.autocast("cuda", dtype=dtype) if kind.endswith("autocast") else nullcontext()


def on_gpu(name: str, source: str) -> tuple[nn.Module, Any]:
    model, batch = made(name, source)
    return model.cuda(), {key: value.cuda() for key, value in batch.items()}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.filterwarnings("ignore:.*half precision.*", "ignore:this step is not captured.*does not run the same")
def test_it_arrives(name: str, cls: Any, kind: str, captured: bool) -> None:
    model, batch = on_gpu(name, "fp16")
    method = cls(rho=METHODS[cls], **({"k": 1} if cls is m.LookSAM else {}))
    around = setting(kind, model)
    before = snapshot(model)
    taken: Any = Captured(method) if captured else method
    shares = []
    for _ in range(6):
        model.zero_grad()
        with around, measured_arrival():
            step = taken.backward(model, batch, exact)
        assert step.arrived is not None
        shares.append(float(step.arrived))
    assert_intact(model, before)
    assert sum(shares) / len(shares) == pytest.approx(1, abs=0.08)
    if kind != "tf32":
        assert len(set(shares)) == len(shares)  # new random bits in every step, also in a replayed one
    if captured and method.capturable:
        assert taken.report.replayed >= 4
        assert not taken.report.obstacles


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("source", ["bf16", "fp16", "4-bit"])
def test_the_loss_rises_and_the_gradient_turns_as_in_float32(source: str, captured: bool) -> None:
    rises, gradients = {}, {}
    for kind in ("float32", "bf16 autocast"):
        model, batch = on_gpu("llama", source)
        method = m.SAM(rho=0.02)
        taken: Any = Captured(method) if captured else method
        found = []
        for _ in range(8):  # bfloat16 activations make the single rise noisy
            model.zero_grad()
            with setting(kind, model):
                found.append(float(taken.backward(model, batch, exact).sharpness))
        rises[kind] = sum(found) / len(found)
        gradients[kind] = torch.cat([g.flatten() for g in grads(model).values()])
    assert rises["bf16 autocast"] == pytest.approx(rises["float32"], rel=0.1)
    assert cosine(*gradients.values()) > 0.99


@pytest.mark.parametrize("grid", ["bf16", "fp16", "tf32"])
def test_the_kernel_rounds_as_torch_does(grid: Any) -> None:
    """Not the same random bits: the same two neighbours for every entry, and the same mean."""
    if not fused.is_ready(torch.device("cuda:0")):
        pytest.skip("no Triton")
    torch.manual_seed(0)
    w, d = torch.randn(2, 8192, device="cuda") * torch.logspace(-6, 0, 8192, device="cuda")
    step = torch.tensor(1e-3, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    draws: dict[str, list[Any]] = {"kernel": [], "torch": []}
    for seed in range(300):
        moved = [w.clone()]
        taken = fused.add_(moved, [d], step, [grid], torch.tensor(seed, device="cuda"))
        assert taken == {0}
        draws["kernel"].append(moved[0])
        draws["torch"].append(add_rounded(w, step * d, grid, generator))
    kernel, reference = (torch.stack(each).double() for each in draws.values())
    every = torch.cat([kernel, reference])
    assert all(len(set(every[:, k].tolist())) <= 2 for k in range(0, 8192, 97))  # two neighbours on the grid
    low, high = every.amin(0), every.amax(0)
    target = (nearest(w, grid) + step * d).double()
    error = ((target - low) * (high - target)).clamp_min(0).sqrt() / 300**0.5
    for mean in (kernel.mean(0), reference.mean(0)):
        seen = error > 0
        away = (mean - target)[seen] / error[seen]
        assert abs(float(away.mean())) < 0.1
        assert float(away.square().mean().sqrt()) < 1.5


def test_tf32_is_seen_only_where_it_is_allowed() -> None:
    torch.set_float32_matmul_precision("highest")
    assert "matmul" not in rounded(torch.device("cuda:0"))
    torch.set_float32_matmul_precision("high")
    assert "matmul" in rounded(torch.device("cuda:0"))
