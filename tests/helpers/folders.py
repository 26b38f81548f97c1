"""Folders with a tiny model and its tokenizer, and with a tiny dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from helpers.tiny import VOCABULARY, encoder

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "a", "big", "small", "mat", "tree", "good", "bad"]


def tiny_bert_folder(folder: Path) -> Path:
    """Saves a BERT with random weights and a tokenizer of a few words."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    assert len(vocabulary) <= VOCABULARY
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=24,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    encoder("bert").save_pretrained(folder)
    return folder


def classification_task(folder: Path, rows: int = 24) -> dict[str, Any]:
    """Writes sentences of two classes and returns the task on them, as plain data."""
    path = folder / "rows.csv"
    texts = (f"{'the cat sat' if i % 2 else 'a dog ran'} {i},{i % 2}" for i in range(rows))
    path.write_text("\n".join(["text,label", *texts]))
    files = dict.fromkeys(("train", "validation"), str(path))
    return {"name": "classification", "files": files, "text": "text", "label": "label", "max_length": 24}
