"""The sizes of losses, gradients and weights along a training: what a radius means in each unit.

    python benchmarks/radius_units.py mrpc bert-small-wiki --lr 1e-4 >> results/radius-units/units.jsonl
    python benchmarks/radius_units.py mnli-prompt smollm2-135m --train base --lr 2e-4 --steps 90 >> ...

Trains with SAM at 0.01 (with ``--train base``: plain LoRA). At the start and five times on the way it prints a line of
JSON: the mean loss, the norm of the batch's gradient and of the weights that a method would perturb, and the norms of
the gradients of single instances. A rule such as ``LossShare(k)`` gives the radius k * loss / gradient norm.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from deltasam import ERM, SAM, instance_gradient_norms
from deltasam.lab.experiments import RunConfig, prepare
from deltasam.step.norms import global_norm
from deltasam.step.selection import select

MARKS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("model")
    parser.add_argument("--train", choices=("full", "adapters", "base"), default="full")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--data")
    given = parser.parse_args()

    is_prompt = given.task.endswith("-prompt")
    task = {"name": given.task} | ({"max_length": 96, "train_rows": 3000} if is_prompt else {})
    model_options: dict[str, Any] = {"path": given.model} | ({} if given.train == "full" else {"lora": 16})
    size = 16 if is_prompt else 32
    run = {"task": task, "model": model_options, "seed": 301, "data": given.data, "batch": {"size": size}}
    prepared = prepare(RunConfig.from_plain(run))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, objective, collate = prepared.model().to(device).train(), prepared.objective(), prepared.collator()
    rows = prepared.config.task.encode(prepared.train_rows, prepared.tokenizer, seed=1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.lr, betas=(0.9, 0.98), eps=1e-6)
    which = "base" if given.train == "base" else "trained"
    method = ERM() if which == "base" else SAM(rho=0.01)

    for step in range(given.steps + 1):
        chosen = [rows[order[(step * size + k) % len(order)]] for k in range(size)]
        batch = {name: value.to(device) for name, value in collate(chosen).items()}
        if step in {int(given.steps * mark) for mark in MARKS}:
            losses, grads = SAM(params=which).passes_for(model, batch, objective).gradient()
            each = instance_gradient_norms(model, batch, objective, params=which)
            weights = [p.detach() for p in select(model, which).values()]
            line = {
                "task": given.task, "model": given.model, "mode": given.train, "t": step, "loss": float(losses.mean()),
                "gn": float(global_norm([g for g in grads if g is not None])), "wn": float(global_norm(weights)),
                "gi_mean": float(each.mean()), "gi_med": float(each.median()),
                "share_med": float((losses / each).median()),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (step + 1) / (0.06 * given.steps)) * (1 - step / (given.steps + 1))
        method.backward(model, batch, objective)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
