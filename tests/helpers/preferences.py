"""Tiny causal language models with adapters, a tokenizer of letters, and pairs of answers."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

WORDS = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c", "d", "e", "f", "g", "h"])}


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Splits at spaces; a token per letter."""
    inner = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(dropout: float = 0.0, **options: Any) -> hf.PreTrainedModel:
    """The same weights every time."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=len(WORDS), num_key_value_heads=1, max_position_embeddings=64, attention_dropout=dropout,
        **sizes, **options,
    ))  # fmt: skip


def lora(model: nn.Module | None = None, *, seed: int = 2) -> Any:
    """Adapters with random weights, so that the model differs from its base."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(llama() if model is None else model, config)
    torch.manual_seed(seed)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return adapted


def preferences(n: int = 12) -> Dataset:
    """Prompts and two answers of different lengths."""
    ends = ["d", "e", "f", "g", "h"]
    return Dataset.from_list([
        {
            "prompt": "a b" + " c" * (i % 3),
            "chosen": " " + " ".join(ends[i % 5 :] * (1 + i % 2)),
            "rejected": " " + " ".join(ends[: 1 + i % 4]),
        }
        for i in range(n)
    ])  # fmt: skip


def pairs(n: int = 4, length: int = 9, *, seed: int = 0) -> dict[str, Tensor]:
    """A batch as TRL's collator makes it: n chosen answers, then n rejected ones, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(WORDS), (2 * n, length), generator=generator)
    ends = torch.randint(5, length + 1, (2 * n, 1), generator=generator)
    mask = (torch.arange(length) < ends).long()
    prompt = torch.randint(1, 4, (n, 1), generator=generator).repeat(2, 1)
    ids[n:] = torch.where(torch.arange(length) < prompt[n:], ids[:n], ids[n:])
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "completion_mask": mask * (torch.arange(length) >= prompt),
    }
