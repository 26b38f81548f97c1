"""delta-SAM in an Accelerate loop with gradient accumulation and clipping.

Run ``accelerate launch examples/accelerate_loop.py``. ``method.backward`` replaces ``accelerator.backward(loss)``.
Each micro-batch has its own perturbation. With fp16 pass ``scale=accelerator.scaler`` and accumulate with
``MicroBatches``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltasam import Classification, DeltaSAM, Method


def train(method: Method, *, epochs: int = 3) -> nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    for epoch in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                scale = 1 / accelerator.gradient_accumulation_steps
                step = method.backward(model, batch, Classification(), scale=scale)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {step.loss:.3f}, sharpness {step.sharpness:.4f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    train(DeltaSAM(rho=0.1, eta=1e-4))
