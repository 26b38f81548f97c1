"""Tiny, reproducible models and data for the table of Trainer options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from deltasam.integrations import MethodTrainer, Seq2SeqMethodTrainer
from deltasam.objectives import Classification
from helpers.tiny import VOCABULARY, causal, sentences
from helpers.trainers import classification_data, fresh, seq2seq_data

Data = list[dict[str, Any]]


@dataclass
class Setup:
    """The arguments of a Trainer except its TrainingArguments."""

    model: Any
    data: Any
    more: dict[str, Any] = field(default_factory=dict)  # for both Trainers
    ours: dict[str, Any] = field(default_factory=dict)  # for ours alone
    trainers: tuple[Any, Any] = (hf.Trainer, MethodTrainer)
    arguments: Any = hf.TrainingArguments


def bert(**options: Any) -> Setup:
    """A classifier with dropout."""
    return Setup(fresh(**options), classification_data(), {"eval_dataset": classification_data(8, seed=5)})


def still() -> Setup:
    """A classifier without dropout."""
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def scored(**more: Any) -> Setup:
    """A classifier with metrics."""
    setup = bert()
    setup.more |= {"compute_metrics": accuracy, **more}
    return setup


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def ragged() -> Setup:
    """Sentences that a collator pads."""
    setup = bert()
    for row in (*setup.data, *setup.more["eval_dataset"]):
        length = int(row.pop("attention_mask").sum())
        row["input_ids"] = row["input_ids"][:length]
    setup.more["data_collator"] = padded
    return setup


def padded(rows: Data) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.stack([r["labels"] for r in rows])}


def columns() -> Setup:
    """A data set with a column that is not an argument of the model."""
    from datasets import Dataset

    setup = bert()
    lists = [{key: value.tolist() for key, value in row.items()} | {"text": "left out"} for row in setup.data]
    setup.data = Dataset.from_list(lists)
    return setup


class Stream(torch.utils.data.IterableDataset[Any]):
    """The rows, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(classification_data())


def stream() -> Setup:
    """A data set without a length."""
    setup = bert()
    setup.data = Stream()
    return setup


class Hungry(hf.BertForSequenceClassification):
    """Runs out of memory in training with more than two instances."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


def hungry() -> Setup:
    """A model that is too large for its batches."""
    setup = bert()
    torch.manual_seed(1)
    setup.model = Hungry(setup.model.config)
    setup.ours["objective"] = Classification()  # an inferred one is compared with the model's loss first
    return setup


def language(model: Any = None, **options: Any) -> Setup:
    """A tiny Llama with dropout; every other sentence has a prompt, which is not a target."""
    torch.manual_seed(1)
    model = causal("llama", **{"attention_dropout": 0.1, **options}) if model is None else model
    batch = sentences(22)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[::2, :2] = -100
    labels[:, 0] = -100  # the first token is never predicted, but some versions of Trainer count its label
    data = [{**{key: value[i] for key, value in batch.items()}, "labels": labels[i]} for i in range(22)]
    return Setup(model, data, {"eval_dataset": data[:6]})


def gpt2() -> Setup:
    """A tiny GPT-2 with dropout."""
    torch.manual_seed(1)
    return language(causal("gpt2"))


def seq2seq(kind: str = "t5") -> Setup:
    """A tiny encoder and decoder in Seq2SeqTrainer."""
    trainers = (hf.Seq2SeqTrainer, Seq2SeqMethodTrainer)
    more = {"eval_dataset": seq2seq_data(4)}
    return Setup(fresh(kind), seq2seq_data(), more, trainers=trainers, arguments=hf.Seq2SeqTrainingArguments)


def adapted(setup: Setup) -> Setup:
    """The same with LoRA."""
    from peft import LoraConfig, get_peft_model

    kind = "CAUSAL_LM" if "CausalLM" in type(setup.model).__name__ else "SEQ_CLS"
    modules = ["q_proj", "v_proj"] if kind == "CAUSAL_LM" else ["query", "value"]
    config = LoraConfig(task_type=kind, r=2, lora_alpha=16, lora_dropout=0.1, target_modules=modules)
    torch.manual_seed(2)
    setup.model = get_peft_model(setup.model, config)
    return setup


def prompted() -> Setup:
    """A tiny Llama with prompt tuning."""
    from peft import PromptTuningConfig, get_peft_model

    setup = language()
    torch.manual_seed(2)
    setup.model = get_peft_model(setup.model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return setup


class OwnHead(nn.Module):
    """A model that is not from transformers and computes its loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.embeddings(input_ids)).mean(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def own_objective(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(
        model(input_ids=batch["input_ids"])["logits"], batch["labels"], reduction="none"
    )


def own_head(dropout: float = 0.1) -> Setup:
    """An unknown head, with an objective."""
    torch.manual_seed(1)
    data = [{key: row[key] for key in ("input_ids", "labels")} for row in classification_data()]
    return Setup(OwnHead(dropout), data, {"eval_dataset": data[:8]}, {"objective": own_objective})


def sft() -> Setup:
    """TRL's trainer of language models, with prompts and completions."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

    from deltasam.integrations import SFTMethodTrainer

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    rows = [{"prompt": "a b" + " c" * (i % 3), "completion": " d e f"[: 2 * (1 + i % 3)]} for i in range(22)]
    more = {"eval_dataset": Dataset.from_list(rows[:6]), "processing_class": tokenizer}
    trainers = (SFTTrainer, SFTMethodTrainer)
    return Setup(language().model, Dataset.from_list(rows), more, trainers=trainers, arguments=SFTConfig)
