"""Packed batches in parts: micro-batches weigh what the mean counts, tokens or documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam import SAM, MicroBatches, PackedCausalLM
from deltasam.integrations._accumulation import AccumulationMixin
from helpers.problems import grads

PACKS = ([3, 4], [2, 5, 1, 3, 2])  # lengths of the documents; one token has no target


def pack(lengths: list[int]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": torch.randint(0, 9, (1, len(positions))), "position_ids": positions.unsqueeze(0)}


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_micro_batches_of_packs_are_the_pack_of_all(reduction: Any) -> None:
    torch.manual_seed(0)
    model, parts = nn.Embedding(9, 9).double(), [pack(lengths) for lengths in PACKS]
    objective = PackedCausalLM(labels="input_ids", reduction=reduction, predict=lambda model, x: model(x["input_ids"]))
    whole = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    found = []
    for batch in (whole, MicroBatches(parts)):
        model.zero_grad()
        step = SAM(rho=0.1).backward(model, batch, objective)
        found.append((step.loss, step.perturbed_losses, grads(model)))
    torch.testing.assert_close(*found)


def test_accumulation_weighs_packs_by_their_documents() -> None:
    class Accumulating(AccumulationMixin):
        _objective = PackedCausalLM(labels="input_ids", reduction="sequence")

    counts = [Accumulating()._count(pack(lengths)) for lengths in PACKS]
    assert [int(count) for count in counts] == [2, 4]
