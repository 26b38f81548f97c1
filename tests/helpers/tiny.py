"""Hugging Face models of a few thousand random parameters, and batches for them; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 41
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}


def encoder_config(kind: str, **options: Any) -> hf.PretrainedConfig:
    """Configuration of a tiny ``bert``, ``roberta`` or ``distilbert``."""
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 24}
        return hf.DistilBertConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **options)
    config = {"bert": hf.BertConfig, "roberta": hf.RobertaConfig}[kind]
    return config(**_ENCODER, pad_token_id=0, **options)


def encoder(kind: str = "bert", **options: Any) -> hf.PreTrainedModel:
    """The tiny encoder without a head, in eval mode."""
    return hf.AutoModel.from_config(encoder_config(kind, **options)).eval()


def classifier(kind: str = "bert", **options: Any) -> hf.PreTrainedModel:
    """The tiny encoder with a sequence classification head, in eval mode."""
    return hf.AutoModelForSequenceClassification.from_config(encoder_config(kind, **options)).eval()


def seq2seq(kind: str, **options: Any) -> hf.PreTrainedModel:
    """A tiny ``t5``, ``bart`` or ``mbart``, in eval mode."""
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes, **options)
        return hf.T5ForConditionalGeneration(config).eval()
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    config_class, model_class = {
        "bart": (hf.BartConfig, hf.BartForConditionalGeneration),
        "mbart": (hf.MBartConfig, hf.MBartForConditionalGeneration),
        "blenderbot": (hf.BlenderbotConfig, hf.BlenderbotForConditionalGeneration),
    }[kind]
    return model_class(config_class(vocab_size=VOCABULARY, **sizes, **heads, **tokens, **options)).eval()


def causal(kind: str, **options: Any) -> hf.PreTrainedModel:
    """A tiny ``gpt2`` or ``llama``, in eval mode."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends, **options)).eval()
    config = hf.LlamaConfig(**_ENCODER, num_key_value_heads=1, **ends, **options)
    return hf.LlamaForCausalLM(config).eval()


def sentences(n: int = 4, length: int = 7, *, seed: int = 0) -> dict[str, Tensor]:
    """Random sentences of different lengths, padded on the right."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (n, length), generator=random)
    lengths = torch.randint(2, length + 1, (n, 1), generator=random)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def labelled(labels: Tensor, **options: Any) -> hf.BatchEncoding:
    """A batch of sentences with these labels, as a tokenizer returns it."""
    return hf.BatchEncoding({**sentences(len(labels), **options), "labels": labels})


def target_tokens(n: int = 4, length: int = 6, *, seed: int = 1, ignore_index: int = -100) -> Tensor:
    """Random target sequences of different lengths, at least two tokens each, ``ignore_index`` after their ends."""
    made = sentences(n, length, seed=seed)
    return made["input_ids"].masked_fill(made["attention_mask"] == 0, ignore_index)
