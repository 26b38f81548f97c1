"""ERM, SAM and delta-SAM in a plain training loop, on a small real task: handwritten digits with some wrong labels.

Run it with ``python examples/plain_loop.py``. The loop is in :func:`train`; the method is the
only thing that differs between the rows of the table.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from deltasam import ERM, SAM, Classification, DeltaSAM, Method

Data = tuple[Tensor, Tensor]
METHODS: dict[str, Method] = {
    "ERM": ERM(),
    "SAM": SAM(rho=0.2),
    "delta-SAM": DeltaSAM(rho=0.2, eta=1e-4),
}


def train(method: Method, data: Data, *, epochs: int, seed: int) -> nn.Module:
    """The loop: ``method.backward`` stands where ``loss.backward()`` would."""
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


def digits(seed: int, *, size: int = 400, wrong: float = 0.2) -> tuple[Data, Data]:
    """``size`` training instances, a share of them with a random label, and the rest for testing, all labels right."""
    source = load_digits()
    inputs, labels = torch.tensor(source.data, dtype=torch.float32) / 16, torch.tensor(source.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    chosen, rest = order[:size], order[size:]
    noisy = labels[chosen].clone()
    noisy[: int(wrong * size)] = torch.randint(10, (int(wrong * size),), generator=torch.Generator().manual_seed(seed))
    return (inputs[chosen], noisy), (inputs[rest], labels[rest])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return 100 * (model(data[0]).argmax(-1) == data[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares ERM, SAM and delta-SAM on handwritten digits.")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs of each method")
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small to share

    scores: dict[str, list[float]] = {name: [] for name in METHODS}
    seconds = dict.fromkeys(METHODS, 0.0)
    for seed in range(options.seeds):
        training, test = digits(seed)
        for name, method in METHODS.items():
            start = time.perf_counter()
            model = train(method, training, epochs=options.epochs, seed=seed)
            seconds[name] += time.perf_counter() - start
            scores[name].append(accuracy(model, test))

    table = Table("method", "passes", "test accuracy", "time")
    for name, method in METHODS.items():
        spread = statistics.stdev(scores[name]) if options.seeds > 1 else 0.0
        mean = statistics.mean(scores[name])
        table.add_row(name, method.passes, f"{mean:.1f} ± {spread:.1f}", f"x {seconds[name] / seconds['ERM']:.1f}")
    console = Console()
    console.print("Handwritten digits: 400 training instances, 20% of their labels random.", table)
    console.print(
        f"Mean ± standard deviation over {options.seeds} seeds, the same data and initial weights for every method."
    )


if __name__ == "__main__":
    main()
