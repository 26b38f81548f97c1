"""One process of ``torchrun``: trains with the Lightning example and with plain Lightning."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deltasam import ERM, SAM, DeltaSAM, Method
from deltasam.integrations import MethodOptimizer
from helpers.data import REPOSITORY
from helpers.trainers import weights

Digits: Any = runpy.run_path(str(REPOSITORY / "examples" / "lightning_module.py"))["Digits"]


class Plain(Digits):
    """The example's model with automatic optimization."""

    def __init__(self, method: Method | None = None) -> None:
        super().__init__(method or ERM())
        self.automatic_optimization = True

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Closure(Plain):
    """The same with a MethodOptimizer that clips like the example."""

    def configure_optimizers(self) -> Any:
        optimizer = MethodOptimizer(super().configure_optimizers(), self.method, self)
        optimizer.register_step_pre_hook(self.clip)
        return optimizer

    def clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def fitted(make: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(int(os.environ["RANK"]))  # different dropout in each process
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(32, 64, generator=random), torch.randint(10, (32,), generator=random))
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=False,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    return weights(module)


def main(folder: Path) -> None:
    found = {
        "plain": fitted(Plain, folder, gradient_clip_val=1.0),
        "erm": fitted(lambda: Digits(ERM()), folder),
        "sam": fitted(lambda: Digits(SAM(rho=0.1)), folder),
        "sam global": fitted(lambda: Digits(SAM(rho=0.1, scope="global")), folder),
        "closure": fitted(lambda: Closure(SAM(rho=0.1)), folder),
        "closure global": fitted(lambda: Closure(SAM(rho=0.1, scope="global")), folder),
        "delta-sam": fitted(lambda: Digits(DeltaSAM(rho=0.1)), folder),
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
