"""ERM, SAM and delta-SAM in a plain training loop, on a small task with some wrong labels. Needs only torch.

Run it with ``python examples/plain_loop.py``. The loop is in :func:`train`; the method is the only thing that differs
between the rows of the table.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from deltasam import ERM, SAM, Classification, DeltaSAM, Method

Data = tuple[Tensor, Tensor]
METHODS: dict[str, Method] = {
    "ERM": ERM(),
    "SAM": SAM(rho=0.2),
    "delta-SAM": DeltaSAM(rho=0.2, eta=1e-4),
}


def train(method: Method, data: Data, *, epochs: int, seed: int) -> nn.Module:
    """Trains a small network; ``method.backward`` replaces ``loss.backward()``."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs)
    objective = Classification()
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(40):
            method.backward(model, (data[0][batch], data[1][batch]), objective)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return model.eval()


def clusters(seed: int, *, size: int = 400, wrong: float = 0.2) -> tuple[Data, Data]:
    """``size`` training instances, a share of them with random labels, and 2,000 test instances with true labels.

    Each of ten classes is two clusters in 64 dimensions.
    """
    generator = torch.Generator().manual_seed(seed)
    centers = 0.45 * torch.randn(10, 2, 64, generator=generator)
    labels, halves = (torch.randint(k, (size + 2000,), generator=generator) for k in (10, 2))
    inputs = centers[labels, halves] + torch.randn(size + 2000, 64, generator=generator)
    noisy = labels[:size].clone()
    noisy[: int(wrong * size)] = torch.randint(10, (int(wrong * size),), generator=generator)
    return (inputs[:size], noisy), (inputs[size:], labels[size:])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return 100 * (model(data[0]).argmax(-1) == data[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares ERM, SAM and delta-SAM on noisy clusters.")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs of each method")
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more

    scores: dict[str, list[float]] = {name: [] for name in METHODS}
    seconds = dict.fromkeys(METHODS, 0.0)
    for seed in range(options.seeds):
        training, test = clusters(seed)
        for name, method in METHODS.items():
            start = time.perf_counter()
            model = train(method, training, epochs=options.epochs, seed=seed)
            seconds[name] += time.perf_counter() - start
            scores[name].append(accuracy(model, test))

    print("Noisy clusters: 400 training instances, 20% of their labels random.")
    print(f"{'method':<12}{'passes':<9}{'test accuracy':<16}time")
    for name, method in METHODS.items():
        spread = statistics.stdev(scores[name]) if options.seeds > 1 else 0.0
        score = f"{statistics.mean(scores[name]):.1f} ± {spread:.1f}"
        print(f"{name:<12}{method.cost:<9}{score:<16}x {seconds[name] / seconds['ERM']:.1f}")
    print(f"Mean ± standard deviation over {options.seeds} seeds, the same data and initial weights for every method.")


if __name__ == "__main__":
    main()
