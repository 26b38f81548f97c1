"""Inputs and output gradients kept in bfloat16: half the memory, the perturbation rounded, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from deltasam import PerInstanceSAM
from deltasam.bench._memory import peak_bytes
from deltasam.instances import Recording, record
from deltasam.instances._factors import LowRank
from helpers.architectures import BY_NAME, make
from helpers.instance_reference import loop, relative

CPU = torch.device("cpu")


def low_rank(recording: Recording) -> Iterator[LowRank]:
    for found in recording.gradients.factors.values():
        yield from (factor for factor in found if isinstance(factor, LowRank))


def kept_bytes(recording: Recording) -> int:
    tensors = {id(t): t for factor in low_rank(recording) for t in (factor.x, factor.d)}
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5", "BERT with LoRA (peft)"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_rounding_is_that_of_bfloat16(name: str, size: int) -> None:
    rho = 0.02
    model, run, _ = make(BY_NAME[name], size)
    exact = loop(model, run, rho)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(run().mean(), list(params.values()), allow_unused=True)
    at_w = {n: g for n, g in zip(params, found, strict=True) if g is not None}
    recording = record(model, run, kept=torch.bfloat16)
    with recording.perturbed(rho / recording.norms):
        losses = run()
        losses.mean().backward()
    assert all(factor.d.dtype is torch.bfloat16 for factor in low_rank(recording))
    assert relative(recording.norms, exact.norms) < 1e-2
    # Relative to what the perturbation does, not to the losses and gradients, of which it changes little.
    assert relative(losses.detach() - recording.losses, exact.perturbed - exact.losses) < 1e-2
    change = torch.cat([(exact.gradient[n] - g).flatten() for n, g in at_w.items()])
    error = torch.cat([(exact.gradient[n] - params[n].grad).flatten() for n in at_w])
    assert error.norm() < 1e-2 * change.norm()


def test_half_the_memory_and_shared_inputs_stay_shared() -> None:
    model, run, _ = make(BY_NAME["BERT"], 4)
    model.float()
    exact, half = record(model, run), record(model, run, kept=torch.bfloat16)
    assert kept_bytes(half) <= 0.51 * kept_bytes(exact)
    assert len({id(f.x) for f in low_rank(half)}) == len({id(f.x) for f in low_rank(exact)})


class Wide(nn.Module):
    """Linear layers only: what is kept between the passes is most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean((1, 2))


def test_the_graph_of_the_second_pass_holds_no_wide_copy() -> None:
    model, x = Wide(), torch.randn(4, 32, 256)

    def peak(factors: str) -> int:
        method = PerInstanceSAM(rho=0.05, factors=factors)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            method.backward(model, x, lambda model, x: model(x))
        model.zero_grad(set_to_none=True)
        return peak_bytes(lambda: method.backward(model, x, lambda model, x: model(x)), CPU)

    layer = 4 * 32 * 256 * 4  # bytes of one layer's inputs in float32
    assert peak("exact") - peak("bfloat16") > 5 * layer


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="factors='half' must be 'exact' or 'bfloat16'"):
        PerInstanceSAM(factors="half")
