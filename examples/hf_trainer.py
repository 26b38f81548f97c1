"""Fine-tunes a Hugging Face classifier with delta-SAM on CSV files with the columns ``text`` and ``label``.

Run ``python examples/hf_trainer.py bert-base-uncased train.csv test.csv``; the model may be a folder. Compared with a
``Trainer`` script, only ``MethodTrainer`` and its ``method`` are new.
"""

from __future__ import annotations

import sys

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from deltasam import DeltaSAM
from deltasam.integrations import MethodTrainer

name, train, test = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("csv", data_files={"train": train, "test": test})
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
trainer = MethodTrainer(
    model=AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(set(data["train"]["label"]))),
    args=TrainingArguments("runs/hf_trainer", num_train_epochs=3, logging_steps=2, report_to="none"),
    method=DeltaSAM(rho=0.01, eta=1e-4),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
trainer.train()
print(trainer.evaluate())
