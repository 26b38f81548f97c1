"""On an accelerator no objective synchronizes: checks read values on the CPU only."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deltasam.objectives import CausalLM, Classification, Contrastive, Regression, Seq2Seq, Tokens

IDS = torch.randint(1, 7, (4, 5))
VIEW = torch.randn(4, 5)


class EncoderDecoder(nn.Embedding):
    """Has the attributes that Seq2Seq needs to make the decoder's inputs."""

    config = SimpleNamespace(decoder_start_token_id=0, pad_token_id=0)

    def forward(self, input_ids, decoder_input_ids):
        return super().forward(decoder_input_ids) + super().forward(input_ids).mean(1, keepdim=True)


CASES = {
    "classification": (Classification(label_smoothing=0.1), nn.Linear(5, 3), (VIEW, torch.tensor([0, 2, 1, 1]))),
    "multi-label": (Classification(multi_label=True), nn.Linear(5, 3), (VIEW, torch.ones(4, 3))),
    "regression": (Regression(), nn.Linear(5, 1), (VIEW, torch.randn(4))),
    "tokens": (Tokens(), nn.Embedding(7, 7), (IDS, IDS)),
    "sequences": (Tokens(reduction="sequence"), nn.Embedding(7, 7), (IDS, IDS)),
    "causal": (CausalLM(label_smoothing=0.1), nn.Embedding(7, 7), (IDS, IDS)),
    "seq2seq": (Seq2Seq(), EncoderDecoder(7, 7), {"input_ids": IDS, "labels": IDS}),
    "contrastive": (Contrastive(), nn.Linear(5, 3), (VIEW, VIEW + 1)),
}


def moved(batch, device):
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return tuple(value.to(device) for value in batch)


@pytest.mark.gpu
@pytest.mark.parametrize(("objective", "model", "batch"), CASES.values(), ids=CASES.keys())
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_synchronization(objective, model, batch):
    expected = objective(model, batch)
    model, batch = copy.deepcopy(model).cuda(), moved(batch, "cuda")
    objective(model, batch)  # the first call initializes libraries, which synchronizes
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = objective.forward(model, batch)
        losses = objective.losses(outputs, batch)
        objective.divergence(outputs, outputs, batch)
        objective.items(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("objective", "model", "batch"), CASES.values(), ids=CASES.keys())
def test_values_are_read_on_the_cpu_only(objective, model, batch):
    """A meta tensor has no values: reading them raises."""
    batch = moved(batch, "meta")
    outputs = objective.forward(copy.deepcopy(model).to("meta"), batch)
    assert objective.losses(outputs, batch).shape == (4,)
    assert objective.divergence(outputs, outputs, batch).shape == (4,)
    objective.items(batch)
