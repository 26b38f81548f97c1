"""Fine-tunes a causal language model with LoRA on a JSON-lines file with ``prompt`` and ``completion``.

Run ``python examples/trl_sft.py HuggingFaceTB/SmolLM2-135M train.jsonl``; the model may be a folder. Compared with a
script for TRL's ``SFTTrainer``, only ``SFTMethodTrainer`` and its ``method`` are new. Every text perturbs the frozen
matrices that carry the adapters. ``SAM(rho=0.005)`` would perturb the adapters themselves: their weights are small, so
the radius must be small, too.
"""

from __future__ import annotations

import sys

from datasets import load_dataset
from peft import LoraConfig
from torch import cuda
from trl import SFTConfig

from deltasam import PerInstanceSAM
from deltasam.integrations import SFTMethodTrainer

name, train = sys.argv[1:3]
trainer = SFTMethodTrainer(
    model=name,
    args=SFTConfig(
        "runs/trl_sft", num_train_epochs=1, logging_steps=2, report_to="none", use_cpu=not cuda.is_available()
    ),
    method=PerInstanceSAM(params="base", rho=0.005),
    train_dataset=load_dataset("json", data_files=train, split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()
