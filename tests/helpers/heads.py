"""Tiny sequence classification heads of nine families with random weights, and batches for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 41
PAD, END = 0, 2
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "pad_token_id": PAD,
}
_PAIR = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 24,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": END,
}

FAMILIES: dict[str, Callable[..., hf.PreTrainedModel]] = {
    "bert": lambda **k: hf.BertForSequenceClassification(hf.BertConfig(**_SIZES, **k)),
    "roberta": lambda **k: hf.RobertaForSequenceClassification(hf.RobertaConfig(**_SIZES, **k)),
    "distilbert": lambda **k: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=24, **k
        )
    ),
    "electra": lambda **k: hf.ElectraForSequenceClassification(hf.ElectraConfig(**_SIZES, embedding_size=12, **k)),
    "mpnet": lambda **k: hf.MPNetForSequenceClassification(hf.MPNetConfig(**_SIZES, **k)),
    "deberta-v2": lambda **k: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**_SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], **k)
    ),
    "t5": lambda **k: hf.T5ForSequenceClassification(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
            **k,
        )
    ),
    "bart": lambda **k: hf.BartForSequenceClassification(hf.BartConfig(vocab_size=VOCABULARY, **_PAIR, **k)),
    "gpt2": lambda **k: hf.GPT2ForSequenceClassification(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=24,
            pad_token_id=PAD,
            bos_token_id=END,
            eos_token_id=END,
            **k,
        )
    ),
}


def head(family: str, *, num_labels: int = 3, seed: int = 0, **options: Any) -> hf.PreTrainedModel:
    """A head with ``num_labels`` classes, or one number, in train mode."""
    torch.manual_seed(seed)
    return FAMILIES[family](num_labels=num_labels, **options).train()


def texts(n: int = 4, length: int = 6, *, classes: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of different lengths that end with one end token, padded on the right; classes=1 for regression."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (n, 1), generator=random)
    lengths[0], lengths[-1] = length, 3
    place = torch.arange(length)
    ids = torch.randint(3, VOCABULARY, (n, length), generator=random)
    ids = torch.where(place == lengths - 1, END, ids).masked_fill(place >= lengths, PAD)
    labels = torch.rand(n, generator=random) if classes == 1 else torch.randint(classes, (n,), generator=random)
    return {"input_ids": ids, "attention_mask": (place < lengths).long(), "labels": labels}


def no_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model without dropout, in train mode."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):  # "dropout_prob" in older versions of transformers
                setattr(module, name, 0.0)
    return model
