"""Tiny models with tokenizers that spell every word, saved for ``from_pretrained``; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Letters and their continuations spell every word, so that no two texts look the same to the model.
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_WORDS = ["the", "of", "to", "and", "in", "is", "it", "for", "on", "with", "return", "set", "get", "file", "name"]
CHAT = (
    "{% for m in messages %}{{ '[CLS]' + m['role'] + ': ' + m['content'] + '[SEP]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[CLS]assistant: ' }}{% endif %}"
)
VOCABULARY = [*_SPECIAL, *".,;:'\"()_-/!?", *_LETTERS, *(f"##{c}" for c in _LETTERS), *_WORDS]


def tokenizer(**options: Any) -> hf.PreTrainedTokenizerFast:
    """A WordPiece tokenizer over letters and a few words, in BERT's format."""
    inner = Tokenizer(models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _SPECIAL, strict=True))
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **names, **options)


def bert_folder(folder: Path, **options: Any) -> Path:
    """A BERT of 2 layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = hf.BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=160, **sizes, **options)
    hf.BertModel(config).save_pretrained(folder)
    tokenizer(model_input_names=["input_ids", "token_type_ids", "attention_mask"]).save_pretrained(folder)
    return folder


def bart_folder(folder: Path) -> Path:
    """A BART of 1 + 1 layers with random weights."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    ends = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(
        vocab_size=len(VOCABULARY), max_position_embeddings=160, forced_eos_token_id=3, **sizes, **ends, **heads
    )
    hf.BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer(model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder)
    return folder


def llama_folder(folder: Path, **options: Any) -> Path:
    """A Llama of 2 layers with random weights, whose tokenizer adds no special tokens and has a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = hf.LlamaConfig(vocab_size=len(VOCABULARY), num_key_value_heads=1, **sizes, **ends, **options)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    made = tokenizer(model_input_names=["input_ids", "attention_mask"])
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    made.eos_token = "[SEP]"
    made.chat_template = CHAT
    made.save_pretrained(folder)
    return folder
