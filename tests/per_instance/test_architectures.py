"""Compares every architecture with the loop over instances: losses, norms and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from deltasam.per_instance import UncoveredError, record
from helpers.architectures import ARCHITECTURES, BY_NAME, Architecture, make
from helpers.instance_reference import gradient_errors, loop, relative

LOW_RANK = [a for a in ARCHITECTURES if a.engine == "low-rank"]


def check(architecture: Architecture, n: int, group: int = 1, rho: float = 0.1) -> None:
    model, run, _ = make(architecture, n)
    exact = loop(model, run, rho, group)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    recording = record(model, run, group=group)
    with recording.perturbed(rho / recording.norms):
        perturbed = run()
        perturbed.mean().backward()
    assert relative(recording.losses, exact.losses) <= architecture.tolerance
    assert relative(recording.norms, exact.norms) <= architecture.tolerance
    assert relative(perturbed.detach(), exact.perturbed) <= architecture.tolerance
    found = {name: p.grad for name, p in model.named_parameters()}
    assert gradient_errors(found, exact.gradient) <= architecture.tolerance
    assert relative(exact.perturbed, exact.losses) > 1e-4  # the perturbation does something
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name])
        assert type(p) is torch.nn.Parameter


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("architecture", LOW_RANK, ids=lambda a: a.name)
def test_low_rank_equals_the_loop(architecture: Architecture, n: int) -> None:
    check(architecture, n)


@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.parametrize("name", ["BERT", "T5", "DeBERTa-v2", "BART", "OPT", "nn.TransformerEncoder", "MPNet"])
def test_batches_as_large_as_the_text_is_long(name: str, n: int) -> None:
    """If T is N or a multiple of it, a table of positions has the shape of a batch."""
    check(BY_NAME[name], n)


@pytest.mark.parametrize("name", ["BERT", "ALBERT", "T5", "GPT-2", "ViT", "ResNet with GroupNorm", "MLP"])
@pytest.mark.parametrize("group", [2, 5])
def test_groups_share_a_perturbation(name: str, group: int) -> None:
    check(BY_NAME[name], 5, group)


def test_uncovered_parameter_is_named() -> None:
    model, run, _ = make(BY_NAME["LSTM tagger"], 2)
    with pytest.raises(UncoveredError, match=r"lstm\.\w+ \(LSTM\) and 3 more.*register_rule"):
        record(model, run)
