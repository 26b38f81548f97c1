"""``deltasam.step.fused.products``: float32 layers as one float16 product, as exact as float32."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.methods import DeltaSAM
from deltasam.objectives import Classification
from deltasam.speed.capture import Captured
from deltasam.step.fused import products
from deltasam.step.rounding import nearest
from deltasam.weighting import FiniteDifference

CPU = torch.device("cpu")


class _Kernel:
    """A kernel in torch."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Any:
        return self.run


def _split(matrix: Tensor, parts: Tensor, scales: Tensor, columns: int, *, RIGHT: bool, **_: Any) -> None:
    assert matrix.is_contiguous()
    for place, value in zip((parts, scales), products.split_by_torch(matrix, right=RIGHT), strict=True):
        place.copy_(value)


def _unscale(
    out: Tensor,
    by_row: Tensor,
    by_column: Tensor,
    bias: Tensor,
    columns: int,
    *,
    HAS_BIAS: bool,
    **_: Any,
) -> None:
    out.mul_(by_column).mul_(by_row[:, None])
    if HAS_BIAS:
        out.add_(bias)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(split_kernel=_Kernel(_split), unscale_kernel=_Kernel(_unscale))
    monkeypatch.setitem(sys.modules, "deltasam.step.fused._split_kernel", kernels)


@pytest.fixture
def layers(slow: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Treats the CPU as a GPU that records a step; the shapes of the layers that are computed by split products."""
    seen: list[tuple[int, ...]] = []

    def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        wanted = not torch.is_grad_enabled() and x.dtype is torch.float32
        seen.extend([tuple(x.shape)] * wanted)
        return wanted

    monkeypatch.setattr(products, "is_ready", lambda device: True)
    monkeypatch.setattr(products, "is_recorded", lambda device: True)
    monkeypatch.setattr(products, "supports", supports)
    return seen


def test_the_parts_are_the_number() -> None:
    matrix = torch.randn(61, 48) * 10.0 ** torch.linspace(-34, 34, 61)[:, None]
    matrix[5] = 0
    matrix[6, :40] *= 1e-6  # far below the largest number of the row
    for right in (False, True):
        parts, scales = products.split_by_torch(matrix, right=right)
        first, second, high = parts.double().chunk(3, 1)
        assert torch.equal(first if right else second, high)
        found = (high + (second if right else first)) * scales.double()[:, None]
        wanted = matrix.double()
        room = 2.0**-23 * wanted.abs() + 2.0**-38 * wanted.abs().amax(1, keepdim=True)
        assert ((found - wanted).abs() <= room).all()


@pytest.mark.parametrize("columns", [64, 768, 3072])
@pytest.mark.usefixtures("slow")
def test_a_layer_is_as_exact_as_in_float32(columns: int) -> None:
    x, weight, bias = torch.randn(4, 8, columns), 0.05 * torch.randn(32, columns), torch.randn(32)
    x *= torch.randn(columns).exp()
    wanted = F.linear(x.double(), weight.double(), bias.double())

    def error(found: Tensor) -> float:
        return float((found.double() - wanted).norm())

    assert error(products.linear(x, weight, bias)) < 1.2 * error(F.linear(x, weight, bias))
    rounded = F.linear(nearest(x, "tf32"), nearest(weight, "tf32"), bias)
    assert error(products.linear(x, weight, bias)) < 0.01 * error(rounded)
    torch.testing.assert_close(products.linear(x[0, 0], weight, None), F.linear(x[0, 0], weight), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("slow")
def test_it_checks_itself_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.works(CPU)
    for name, wrong in {
        "float32_product": lambda a, b: nearest(a.float(), "bf16") @ nearest(b.float(), "bf16").t(),
        "split": lambda matrix, right=False: products.split_by_torch(matrix, right=True),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(products, name, wrong)
            assert not products.works(CPU)


def test_second_differences_have_the_noise_of_float32(layers: list[tuple[int, ...]]) -> None:
    """The root mean square of l(w + r) + l(w - r) - 2 l(w), minus the same in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())
    model.append(nn.Linear(256, 4))
    x, y = torch.randn(256, 96), torch.randint(4, (256,))
    w = [p.detach().clone() for p in model.parameters()]
    r = [torch.randn_like(p) for p in w]
    size = 0.05 / float(torch.cat([d.flatten() for d in r]).norm())
    plus = [a + size * d for a, d in zip(w, r, strict=True)]
    minus = [a + (a - b) for a, b in zip(w, plus, strict=True)]

    @torch.no_grad()
    def second(dtype: torch.dtype) -> Tensor:
        losses = []
        for weights in (plus, minus, w):
            named = dict(zip((name for name, _ in model.named_parameters()), weights, strict=True))
            outputs = torch.func.functional_call(model, {k: v.to(dtype) for k, v in named.items()}, (x.to(dtype),))
            losses.append(F.cross_entropy(outputs, y, reduction="none").double())
        return losses[0] + losses[1] - 2 * losses[2]

    exact, plain = second(torch.float64), second(torch.float32)
    with products.fast_products(model, CPU):
        split = second(torch.float32)
    assert len(layers) == 9
    noise = [float((found - exact).square().mean().sqrt()) for found in (split, plain)]
    assert 0 < noise[0] < 1.15 * noise[1]


def test_probes_of_a_recorded_step_use_it_and_the_other_passes_do_not(layers: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    batch = torch.randn(6, 8), torch.randint(3, (6,))
    found = {}
    for name, precision, bf16 in (("wanted", "float32", False), ("split", "float32", True), ("no", "ambient", True)):
        method = DeltaSAM(weighting=FiniteDifference(radius=2.0, precision=precision))  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            found[name] = method.backward(model, batch, Classification()).weights
        # Three probes with two layers each; the same precision as the pass at w needs none.
        assert len(layers) == (6 if name == "split" else 0), name
        layers.clear()
    torch.testing.assert_close(found["split"], found["wanted"], rtol=1e-4, atol=1e-5)


def test_a_compiled_model_computes_its_own_products(
    layers: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    monkeypatch.setattr(model[0], "_compiled_call_impl", model[0]._call_impl, raising=False)
    monkeypatch.setattr(products, "is_compiler_loaded", lambda: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        DeltaSAM().backward(model, (torch.randn(6, 8), torch.randint(3, (6,))), Classification())
    assert layers == []


def test_where_it_is_not_used() -> None:
    """On a CPU, in a step that is not recorded, with a graph."""
    assert not products.is_ready(CPU)
    x, weight = torch.randn(1024, 64), torch.randn(32, 64)
    with torch.no_grad():
        assert not products.supports(x, weight, None)
    with products.fast_products(nn.Linear(64, 32), CPU):
        assert torch.equal(F.linear(x, weight), x @ weight.t())


def test_a_failure_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "_ready", {})
    monkeypatch.setattr(products, "is_recorded", lambda device: False)
    gpu = torch.device("cuda", 7)
    monkeypatch.setattr(products, "works", lambda device: False)
    assert [products.is_ready(gpu) for _ in range(2)] == [False] * 2
    assert ["not exact enough" in record.message for record in caplog.records] == [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))  # no gain: no warning
    assert not products.is_ready(torch.device("cuda", 8))
    assert len(caplog.records) == 1


def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    code = "import torch; from deltasam.step.fused import products; print(products.works(torch.device('cpu')))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "True", done.stderr


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def gains() -> bool:
    return torch.cuda.get_device_capability() in products._CAPABILITIES


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert products.works(torch.device("cuda"))
    assert products.is_ready(torch.device("cuda:0")) == gains()


@pytest.mark.gpu
@torch.no_grad()
def test_second_differences_on_a_gpu_have_the_noise_of_float32() -> None:
    """Tensor cores cut off bits when they add up, which float32 rounds: that shifts losses, but not their differences.

    BERT of four layers with the sizes of BERT-base; the noise of float32 and of split products against float64.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=97, num_hidden_layers=4)
    model = transformers.BertForSequenceClassification(config).cuda().eval()
    ids = torch.randint(5, 97, (64, 32), device="cuda")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    objective = Classification()
    w = [p.detach().clone() for p in model.parameters()]
    noise: dict[str, list[Tensor]] = {"float32": [], "split": []}

    def second(points: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
        model.to(dtype)
        losses = []
        for weights in points:
            for p, value in zip(model.parameters(), weights, strict=True):
                p.data = value.to(dtype)
            losses.append(objective(model, batch).double())
        return losses[0] + losses[1] - 2 * losses[2]

    for _ in range(4):
        r = [torch.randn_like(p) for p in w]
        size = 0.05 / float(torch.cat([d.flatten() for d in r]).norm())
        plus = [a + size * d for a, d in zip(w, r, strict=True)]
        points = [plus, [a + (a - b) for a, b in zip(w, plus, strict=True)], w]
        exact = second(points, torch.float64)
        noise["float32"].append(second(points, torch.float32) - exact)
        with products._Linear():
            noise["split"].append(second(points, torch.float32) - exact)
    found = {name: float(torch.cat(values).square().mean().sqrt()) for name, values in noise.items()}
    print(found)
    assert 0 < found["split"] < 1.3 * found["float32"]


@pytest.mark.gpu
def test_captured_probes_use_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a radius where the weights are above rounding they are those of an ordinary step, in every replay."""
    if not gains():
        pytest.skip("not faster on this GPU")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 3)).cuda()
    batch = torch.randn(640, 64, device="cuda"), torch.randint(3, (640,), device="cuda")
    assert products.is_ready(torch.device("cuda:0"))
    own, used = products.linear, []
    monkeypatch.setattr(products, "linear", lambda *given: used.append(given[1].shape) or own(*given))
    method = DeltaSAM(weighting=FiniteDifference(radius=8.0))
    captured = Captured(DeltaSAM(weighting=method.weighting))
    for number in range(5):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            a, b = (each.backward(model, batch, Classification()).weights for each in (method, captured))
        assert len(used) == (0 if number == 0 else 6)  # two of the layers, three probes, recorded once
        assert torch.allclose(a, b, rtol=0.01, atol=1e-4)
    assert captured.report.replayed == 4
