"""How much of SAM's perturbation arrives in the matrix products in float32, TF32 and bf16 autocast, along a training.

    DELTASAM_MODELS=models DELTASAM_DATA=data python benchmarks/arrives.py --json arrives.json

bert-small-wiki on MRPC, plain training as in configs/sweeps/evidence/glue.yaml. Its file is float16, so at first all
weights are on TF32's grid, and many are exactly half-way between two bfloat16 values; the optimizer moves them off the
grid. At some updates the same batches go through ``SAM.backward`` in each precision, without dropout. Compared with
float32: the rise of the loss, the cosine of the gradient at w + eps, and the cosine of its change since w.
``python -m deltasam.lab.pages`` draws the figure of docs/precision.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from deltasam import ERM, SAM

Batch = dict[str, Tensor]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return cross_entropy(model(**inputs).logits.float(), batch["labels"], reduction="none")


@contextlib.contextmanager
def computed_in(precision: str, device: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def gradient(method: Any, model: nn.Module, batches: Sequence[Batch], precision: str) -> tuple[Tensor, float]:
    """The gradient of the method and the rise of the loss, means over the batches."""
    model.zero_grad()
    rises = []
    for batch in batches:
        with computed_in(precision, batch["labels"].device.type):
            rises.append(float(method.backward(model, batch, losses).sharpness))
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found) / len(batches), sum(rises) / len(rises)


def measure(model: nn.Module, batches: Sequence[Batch], radii: Sequence[float], precisions: Sequence[str]) -> Any:
    """A record for every radius and precision; weights and mode of the model are restored."""
    model.eval()
    plain = {precision: gradient(ERM(), model, batches, precision)[0] for precision in ("fp32", *precisions)}
    rows = []
    for rho in radii:
        meant, rise = gradient(SAM(rho=rho), model, batches, "fp32")
        rows.append({"rho": rho, "precision": "fp32", "rise": rise, "share": 1.0, "cosine": 1.0, "turn": 1.0})
        for precision in precisions:
            got, risen = gradient(SAM(rho=rho), model, batches, precision)
            change, wanted = got - plain[precision], meant - plain["fp32"]
            rows.append(
                {
                    "rho": rho, "precision": precision, "rise": risen, "share": risen / rise,
                    "cosine": float(cosine_similarity(got, meant, dim=0)),
                    "turn": float(cosine_similarity(change, wanted, dim=0)),
                }
            )  # fmt: skip
    model.zero_grad()
    model.train()
    return rows


def tf32_cuts_off() -> bool:
    """Whether TF32 products of the device truncate instead of rounding to nearest."""
    weight = torch.full((64, 64), 1 + 0.75 * 2.0**-10, device="cuda")  # nearest: 1 + 2^-10
    with computed_in("tf32", "cuda"):
        return bool((weight @ torch.eye(64, device="cuda"))[0, 0] == 1.0)


def load(model: str, rows: int, size: int, device: str) -> tuple[nn.Module, list[Batch]]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = str(Path(os.environ.get("DELTASAM_MODELS", ".")) / model)
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=2).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(Path(os.environ["DELTASAM_DATA"]) / "mrpc" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        data = [json.loads(line) for line in file][:rows]
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1)).tolist()
    batches = []
    for start in range(0, len(order) - size + 1, size):
        part = [data[index] for index in order[start : start + size]]
        words = tokenizer(
            [row["sentence1"] for row in part], [row["sentence2"] for row in part],
            truncation=True, max_length=128, padding=True, return_tensors="pt",
        )  # fmt: skip
        labels = torch.tensor([row["label"] for row in part])
        batches.append({name: value.to(device) for name, value in {**words, "labels": labels}.items()})
    return made, batches


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-small-wiki")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.003, 0.01, 0.02, 0.05])
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 1, 3, 10, 30, 100, 342])
    parser.add_argument("--size", type=int, default=32, help="batch size")
    parser.add_argument("--measured", type=int, default=8, help="number of measured batches")
    parser.add_argument("--rows", type=int, default=3668, help="number of training rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precisions = ["tf32", "bf16"] if device == "cuda" else ["bf16"]
    model, batches = load(options.model, options.rows, options.size, device)
    held, trained = batches[: options.measured], batches[options.measured :] or batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    record: dict[str, Any] = {
        "model": options.model, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "batches": len(held), "rows": options.size, "points": [],
    }  # fmt: skip
    if device == "cuda":
        record["tf32_cuts_off"] = tf32_cuts_off()
        print(f"TF32 products truncate: {record['tf32_cuts_off']}")
    print("| updates | rho | precision | rise of the loss | share of float32's | cosine | cosine of the change |")
    print("|---|---|---|---|---|---|---|")
    for update in range(max(options.updates) + 1):
        if update in options.updates:
            for row in measure(model, held, options.radii, precisions):
                record["points"].append({"updates": update, **row})
                numbers = f"{row['rise']:.4f} | {row['share']:.2f} | {row['cosine']:.4f} | {row['turn']:.3f}"
                print(f"| {update} | {row['rho']} | {row['precision']} | {numbers} |", flush=True)
        with computed_in(precisions[0] if device == "cuda" else "fp32", device):
            ERM().backward(model, trained[update % len(trained)], losses)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
