"""The whole way: a model compiled with the package's settings, and what a method makes of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from deltasam import SAM, Classification
from deltasam.compiling import compiled


class Branches(nn.Module):
    """Two layers of one input, as query and key are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).tanh() * self.second(x))


@pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # torch 2.6, of its own settings
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_with_the_compiled_model_is_that_of_the_model(autocast: bool) -> None:
    torch.manual_seed(0)
    model, batch = Branches(), (torch.randn(16, 6), torch.randint(3, (16,)))
    gradients = []
    for each in (model, compiled(model)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            SAM(rho=0.05).backward(each, batch, Classification())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=0.02 if autocast else 1e-5)


def test_further_options_reach_the_compiler() -> None:
    with pytest.raises(RuntimeError, match="no_such_option"):
        compiled(Branches(), no_such_option=True)


def test_the_compiler_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, deltasam.compiling; assert 'torch._inductor.custom_graph_pass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
