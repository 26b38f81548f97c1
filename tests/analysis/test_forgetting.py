"""Log loss per token against a loop over texts and tokens; forgetting with and without adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deltasam.analysis import forgetting, token_nll
from helpers.tiny import causal


def batch(lengths: list[int], longest: int) -> dict[str, Tensor]:
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths])
    return {"input_ids": torch.randint(1, 40, mask.shape) * mask, "attention_mask": mask}


def obvious(model: nn.Module, data: list[dict[str, Tensor]]) -> float:
    found = []
    for each in data:
        for ids, mask in zip(each["input_ids"], each["attention_mask"], strict=True):
            text = ids[: int(mask.sum())]
            log_p = model(input_ids=text[None]).logits[0].double().log_softmax(-1)
            found += [-log_p[t - 1, text[t]].item() for t in range(1, len(text))]
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_token_counts_the_same(kind: str) -> None:
    model = causal(kind).double()
    data = [batch([7, 3, 5], 7), batch([4], 6), batch([1, 1], 2)]
    model.train()
    found = token_nll(model, data)
    assert model.training
    with torch.no_grad():
        assert found == pytest.approx(obvious(model.eval(), data), abs=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_on_the_left_counts_as_padding_on_the_right(kind: str) -> None:
    """The first token of a text has none before it, and GPT-2 counts the positions from the padding."""
    model = causal(kind).double()
    right = batch([7, 3, 5], 7)
    left = {
        name: torch.stack([row.roll(7 - n) for row, n in zip(value, (7, 3, 5), strict=True)])
        for name, value in right.items()
    }
    assert left["attention_mask"][1].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert token_nll(model, [left]) == pytest.approx(token_nll(model, [right]), abs=1e-12)


def test_labels_choose_the_tokens() -> None:
    model = causal("llama").eval()
    ids = torch.randint(1, 40, (1, 6))
    labels = torch.tensor([[-100, -100, -100, -100, -100, int(ids[0, 5])]])
    with torch.no_grad():
        expected = -model(input_ids=ids).logits[0, 4].double().log_softmax(-1)[ids[0, 5]]
    assert token_nll(model, [{"input_ids": ids, "labels": labels}]) == pytest.approx(float(expected), rel=1e-5)


def test_rise_with_adapters_another_model_or_a_number() -> None:
    peft = pytest.importorskip("peft")
    data = [batch([7, 3], 7)]
    base = causal("llama").eval()
    first = token_nll(base, data)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, p in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    found = forgetting(tuned, data)
    assert found.before == pytest.approx(first, rel=1e-6)
    assert found.after == token_nll(tuned, data)
    assert abs(float(found)) > 1e-3
    assert forgetting(tuned, data, before=first).before == first
    other = causal("gpt2")
    assert forgetting(tuned, data, before=other).before == token_nll(other, data)


def test_errors() -> None:
    model = causal("llama")
    with pytest.raises(ValueError, match="no adapters that could be disabled; pass before="):
        forgetting(model, [batch([3], 3)])
    with pytest.raises(ValueError, match="no token to predict"):
        token_nll(model, [batch([1], 1)])
    with pytest.raises(ValueError, match="data is empty"):
        token_nll(model, [])
