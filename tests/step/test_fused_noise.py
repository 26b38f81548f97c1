"""``deltasam.step.fused.noise``: noise that is drawn while it is added, by a table of addresses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import RandomPerturbation
from deltasam.methods import _random_perturbation as method_module
from deltasam.speed.capture import Captured
from deltasam.step import fused, moving
from deltasam.step.fused import noise
from deltasam.step.fused.noise import Noise

CPU = torch.device("cpu")


class Slow:
    """The kernel in Python, over addresses; in a recording it runs when it is replayed."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.streams: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(table: Tensor, step: Tensor, seed: Tensor, number: int, **options: Any) -> None:
            self.waiting.append(lambda: self.run(table, float(step), int(seed), number))
            if fused.Tables._current is None:
                self.replay()

        return launch

    def run(self, table: Tensor, step: float, seed: int, number: int) -> None:
        _, _, sizes, weights, scales, outs, codes, columns, by_column = table.view(9, number).tolist()
        for k in range(number):
            assert codes[k] == 0
            self.streams.append(seed + 2 * k)
            z = drawn(sizes[k], seed + 2 * k)
            for at in range(sizes[k]):
                row = at // columns[k]
                index = at - row * columns[k] if by_column[k] else row
                w, out = (ctypes.c_float.from_address(p[k] + 4 * at) for p in (weights, outs))
                scale = ctypes.c_float.from_address(scales[k] + 4 * index).value
                out.value = w.value + step * scale * float(z[at])

    def replay(self) -> None:
        for launch in self.waiting:
            launch()
        self.waiting.clear()


def drawn(size: int, stream: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(stream))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    kernel = Slow()
    tl = SimpleNamespace(float32=None)
    monkeypatch.setitem(
        sys.modules, "deltasam.step.fused._kernel", SimpleNamespace(noise_kernel=kernel, move_kernel=None, tl=tl)
    )
    return kernel


def matrices() -> tuple[list[Tensor], list[Noise]]:
    torch.manual_seed(0)
    seed = torch.tensor(1000)
    weights = [torch.randn(4, 3), torch.randn(3, 8), torch.randn(8)]
    scales = [torch.rand(4), torch.rand(8), torch.rand(1)]
    return weights, [
        Noise(scales[0], 3, False, seed), Noise(scales[1], 8, True, seed), Noise(scales[2], 8, False, seed)
    ]  # fmt: skip


def wanted(weights: list[Tensor], noises: list[Noise], step: float) -> list[Tensor]:
    z = [drawn(w.numel(), 1000 + 2 * k).view(w.shape) for k, w in enumerate(weights)]
    scales = [noises[0].scales[:, None], noises[1].scales, noises[2].scales]
    return [w + step * s * d for w, s, d in zip(weights, scales, z, strict=True)]


def test_rows_columns_and_whole_tensors(slow: Slow) -> None:
    weights, noises = matrices()
    outs = [torch.empty_like(w) for w in weights]
    noise.fill(weights, noises, outs, torch.tensor(0.5), [None] * 3)
    torch.testing.assert_close(outs, wanted(weights, noises, 0.5))


@pytest.mark.parametrize("way", ["in place", "recorded"])
def test_a_move_along_noise_and_a_drawn_direction(slow: Slow, way: str) -> None:
    weights, noises = matrices()
    params = [nn.Parameter(w.clone()) for w in (*weights[:2], torch.ones(3), weights[2])]
    direction = [*noises[:2], torch.full((3,), 2.0), noises[2]]
    move = {"in place": moving._in_place, "recorded": moving._recorded}[way]
    with fused.Tables(CPU).open() if way == "recorded" else nullcontext():
        context = move(params, direction, torch.tensor(0.5))
        context.__enter__()
        moved = [p.data for p in params]
    slow.replay()
    found = [value.clone() for value in moved]
    torch.testing.assert_close(found[2], torch.full((3,), 2.0))
    torch.testing.assert_close([*found[:2], found[3]], wanted(weights, noises, 0.5))
    context.__exit__(None, None, None)
    for p, w in zip(params, (*weights[:2], torch.ones(3), weights[2]), strict=True):
        assert torch.equal(p.detach(), w)


def test_launches_have_different_streams(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_MOST", 2)
    weights = [torch.randn(4) for _ in range(5)]
    noises = [Noise(torch.ones(1), 4, False, torch.tensor(7)) for _ in weights]
    noise.fill(weights, noises, weights, torch.tensor(1.0), [None] * 5)
    assert slow.streams == [7, 9, 11, 13, 15]


def test_what_the_kernel_supports() -> None:
    assert noise.supports(torch.zeros(4, 3))
    assert noise.supports(torch.zeros(8, dtype=torch.bfloat16))
    for other in (torch.zeros(3), torch.zeros(0), torch.zeros(4, dtype=torch.float64), torch.zeros(4, 3).t()):
        assert not noise.supports(other)


def test_the_method_leaves_its_noise_to_the_kernel(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supported parameters get the noise of the kernel, others drawn noise: all in proportion to their rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 3))  # a bias of three numbers is not supported
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(method_module, "is_ready", lambda device: True)
    monkeypatch.setattr(moving, "_way_to_move", lambda params: moving._in_place)
    seen: list[dict[str, Tensor]] = []

    def looking(model: nn.Module, x: Tensor) -> Tensor:
        seen.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        return model(x).square().mean(1)

    method = RandomPerturbation(rho=0.2)
    for _ in range(2):
        method.backward(model, torch.randn(5, 64), looking)
    assert len(slow.streams) == 6
    assert len(set(slow.streams)) == 6
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(value.any() for value in seen[0].values())
    assert not any(torch.allclose(seen[0][name], seen[1][name]) for name in before)
    ratios = seen[0]["0.weight"].norm(dim=1) / before["0.weight"].norm(dim=1)
    assert torch.allclose(ratios, torch.full_like(ratios, 0.2), rtol=0.4)
    again = RandomPerturbation(rho=0.2)
    again.load_state_dict({"steps": 1})
    again.backward(model, torch.randn(5, 64), looking)
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in before)


def test_without_triton_it_is_not_ready() -> None:
    noise.is_ready.cache_clear()
    assert not noise.is_ready(CPU)


@pytest.mark.parametrize(("dtype", "grid"), [("float32", None), ("bfloat16", "bf16")])
def test_the_kernel_itself_in_tritons_interpreter(dtype: str, grid: str | None) -> None:
    pytest.importorskip("triton")
    code = (
        "import torch; from deltasam.step.fused import noise; "
        f"print(noise._adds(torch.device('cpu'), torch.{dtype}, {grid!r}))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert noise.works(torch.device("cuda"))
    assert noise.is_ready(torch.device("cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_noise_is_that_of_ordinary_steps(dtype: torch.dtype) -> None:
    """Every replay draws other noise, that of its step, and leaves the weights as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8)).to("cuda", dtype)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(16, 256, device="cuda", dtype=dtype)
    found = []

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean(1)

    for method in (Captured(RandomPerturbation(rho=0.3)), RandomPerturbation(rho=0.3)):
        steps = [method.backward(model, x, objective) for _ in range(6)]
        found.append(torch.stack([step.loss for step in steps]))
        if isinstance(method, Captured):
            assert method.report.replayed == 4  # after two ordinary steps, the first of its own kind
    torch.testing.assert_close(*found, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
    assert len(set(found[0].tolist())) == 6
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
