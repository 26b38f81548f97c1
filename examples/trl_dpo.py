"""Preference optimization (DPO) with LoRA on a JSON-lines file with ``prompt``, ``chosen`` and ``rejected``.

Run ``python examples/trl_dpo.py HuggingFaceTB/SmolLM2-135M-Instruct train.jsonl``; the model may be a folder. Compared
with a script for TRL's ``DPOTrainer``, only ``DPOMethodTrainer`` and its ``method`` are new. Every pair of answers
perturbs the frozen matrices that carry the adapters. The reference, the model without adapters, is not perturbed.
"""

from __future__ import annotations

import sys

from datasets import load_dataset
from peft import LoraConfig
from torch import cuda
from trl import DPOConfig

from deltasam import PerInstanceSAM
from deltasam.integrations import DPOMethodTrainer

name, train = sys.argv[1:3]
trainer = DPOMethodTrainer(
    model=name,
    args=DPOConfig(
        "runs/trl_dpo", num_train_epochs=1, logging_steps=2, report_to="none", use_cpu=not cuda.is_available()
    ),
    method=PerInstanceSAM(params="base", rho=0.005),
    train_dataset=load_dataset("json", data_files=train, split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
