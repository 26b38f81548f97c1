"""A model compiled with the settings of the package, and steps of methods with it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from deltasam import SAM, Classification
from deltasam.speed.compiling import _passes, compiled


class Branches(nn.Module):
    """Two layers with the same input, like query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).tanh() * self.second(x))


@pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # torch 2.6, about its own settings
@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])  # the changes are in bf16
def test_a_step_with_the_compiled_model_equals_that_of_the_model(autocast: bool) -> None:
    torch.manual_seed(0)
    model, batch = Branches(), (torch.randn(16, 6), torch.randint(3, (16,)))
    gradients = []
    for each in (model, compiled(model)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            SAM(rho=0.05).backward(each, batch, Classification())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=0.02 if autocast else 1e-5)


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="torch 2.6 leaves settings that are functions out")
def test_the_compiler_makes_all_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("merge_layers", "write_out_attention", "keep_float32"):
        inner = getattr(_passes, name)
        monkeypatch.setattr(_passes, name, lambda graph, name=name, inner=inner: (calls.append(name), inner(graph)))
    monkeypatch.setattr(_passes._Pass, "uuid", lambda self: None)  # nothing from the cache
    torch._dynamo.reset()
    fast = compiled(Branches())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast(torch.randn(16, 6)).sum().backward()
    assert calls == ["merge_layers", "write_out_attention", "keep_float32", "keep_float32"]  # forward and backward


def test_the_cache_key_depends_on_the_changes() -> None:
    before, after = _passes.PASSES.values()
    assert before.uuid() == _passes.BeforeGradients().uuid()
    assert isinstance(after.uuid(), bytes)


def test_dynamic_and_fullgraph_are_passed_to_torch() -> None:
    class Printing(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Printing(), fullgraph=True)(torch.randn(2, 6))


def test_further_options_reach_the_compiler() -> None:
    with pytest.raises(ValueError, match=r"max_autotune_gem=True.*max_autotune_gemm"):
        compiled(Branches(), max_autotune_gem=True)
    with pytest.raises(RuntimeError, match="max_autotune_gemm"):  # it checks the value
        compiled(Branches(), max_autotune_gemm="yes")


def test_the_compiler_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, deltasam.speed.compiling; assert 'torch._inductor.custom_graph_pass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
