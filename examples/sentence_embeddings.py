"""Learns sentence embeddings from unlabelled sentences, with delta-SAM in sentence-transformers' trainer.

Run ``python examples/sentence_embeddings.py bert-base-uncased sentences.txt``, one sentence per line; the model may be
a folder. The two views of a sentence differ in their dropout masks (SimCSE). Only the second view is perturbed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from deltasam import Contrastive, DeltaSAM
from deltasam.integrations import SentenceTransformerMethodTrainer

name, file = sys.argv[1:3]
sentences = Path(file).read_text().splitlines()
model = SentenceTransformer(name)
trainer = SentenceTransformerMethodTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments("runs/sentence_embeddings", logging_steps=1, report_to="none"),
    train_dataset=Dataset.from_dict({"first": sentences, "second": sentences}),
    method=DeltaSAM(rho=0.05, eta=1e-4),
    objective=Contrastive(temperature=0.05),
)
trainer.train()
model.save("runs/sentence_embeddings/model")
