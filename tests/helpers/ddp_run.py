"""What a process of ``torchrun`` does in the test of data parallelism; alone, it is what that is compared with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from deltasam.integrations import MethodTrainer
from deltasam.methods import ERM, DeltaSAM, Method
from helpers.trainers import arguments, classification_data, fresh, largest_difference, seq2seq_data, weights

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def trainer_for(kind: str, method: Method, folder: Path, **options: Any) -> MethodTrainer:
    model = fresh(kind).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 8 // WORLD, "train_sampling_strategy": "sequential"}
    data = seq2seq_data() if kind == "t5" else classification_data()
    args = arguments(folder, **(settings | options))
    return MethodTrainer(model=model, args=args, method=method, train_dataset=data)


def gathered(values: dict[str, torch.Tensor]) -> float:
    """The largest difference between the weights of the processes."""
    flat = torch.cat([value.flatten().double() for value in values.values()])
    others = [torch.empty_like(flat) for _ in range(WORLD)]
    torch.distributed.all_gather(others, flat)
    return max(float((flat - other).abs().max()) for other in others)


def main(folder: Path) -> None:
    found: dict[str, float] = {}
    for kind in ("bert", "t5"):
        trainer = trainer_for(kind, ERM(), folder / f"{kind}-{WORLD}", max_steps=2, gradient_accumulation_steps=2)
        trainer.train()
        if RANK == 0:
            torch.save(weights(trainer.model), folder / f"{kind}-{WORLD}.pt")
    if WORLD > 1:
        options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
        whole = trainer_for("bert", DeltaSAM(), folder / "delta", **options)
        whole.train()
        found["between the processes"] = gathered(weights(whole.model))
        resumed = trainer_for("bert", DeltaSAM(), folder / "delta", **options)
        resumed.train(resume_from_checkpoint=str(folder / "delta" / "checkpoint-3"))
        found["after a resume"] = largest_difference(weights(resumed.model), weights(whole.model))
        (folder / f"found-{RANK}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
