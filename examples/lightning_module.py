"""delta-SAM in Lightning, with manual optimization: ``python examples/lightning_module.py``.

``method.backward`` replaces ``self.manual_backward(loss)``. It takes ``self.trainer.strategy.model``: this module in
one process, and in several (``devices=2``) the module in DistributedDataParallel, which averages the gradients.
Precision plugins, callbacks and checkpoints are Lightning's. Two hooks save the method's state in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltasam import Classification, DeltaSAM, Method


class Digits(lightning.LightningModule):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method, self.automatic_optimization = method, False
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        step = self.method.backward(self.trainer.strategy.model, batch, Classification())
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict({"loss": step.loss, "sharpness": step.sharpness}, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["method"] = self.method.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.method.load_state_dict(checkpoint["method"])


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    loader = DataLoader(TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels)), 32, shuffle=True)
    trainer = lightning.Trainer(max_epochs=3, logger=False, default_root_dir="runs/lightning_module")
    trainer.fit(Digits(DeltaSAM(rho=0.1, eta=1e-4)), loader)
