"""How much of a per-instance perturbation of an LLM's frozen weights arrives under bfloat16 autocast.

    python benchmarks/arrives_per_instance.py --json results/rounding/per-instance.json

The model, its adapters and the text are those of ``arrives_llm.py``, with base matrices rounded to bfloat16, so that
autocast does not change them. ``PerInstanceSAM(params="base")`` takes a step in three ways:

- meant: in float32;
- added last: under autocast, with the perturbation added to the rounded output of every layer;
- deltasam: under autocast, with the output rounded once, after the perturbation is added.

Recorded are the rise of the mean loss, relative to the meant one, and the cosine of the adapters' gradient with it.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arrives_llm import is_base, load, text
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import deltasam
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.tensors import unwrapped

WAYS = ("meant", "added last", "deltasam")


@contextmanager
def added_last() -> Iterator[None]:
    """Inside, the engine adds perturbations to outputs that are rounded already."""

    def linear(
        self: Any, weight: Any, bias: Any, x: Tensor, matrix: Tensor, recorded: Tensor, layout: Any, flip: bool = False
    ) -> Tensor:
        y: Tensor = self.matrix(weight, bias, x, F.linear(x, matrix, unwrapped(bias)), recorded, layout, flip)
        return y

    original = PassState.linear
    PassState.linear = linear  # type: ignore[method-assign]
    try:
        yield
    finally:
        PassState.linear = original  # type: ignore[method-assign]


def step(model: nn.Module, ids: Tensor, rho: float, way: str) -> tuple[float, Tensor]:
    """The rise of the loss, and the gradient of the adapters."""
    model.zero_grad()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    method = deltasam.PerInstanceSAM(params="base", rho=rho, engine="low-rank")
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=way != "meant"):
        if way == "added last":
            with added_last():
                taken = method.backward(model, batch, deltasam.CausalLM())
        else:
            taken = method.backward(model, batch, deltasam.CausalLM())
    gradient = [p.grad.flatten() for name, p in model.named_parameters() if "lora_" in name and p.grad is not None]
    return float(taken.sharpness), torch.cat(gradient).double()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a GGUF file")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    model, tokenizer = load(options.model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
        if is_base(name):
            p.data = p.data.bfloat16().float()
    model.to(options.device)
    ids = text(tokenizer, options.rows, options.length).to(options.device)
    record: dict[str, Any] = {
        "model": Path(options.model).name, "rows": options.rows, "length": options.length, "device": options.device,
        "python": platform.python_version(), "torch": torch.__version__, "points": [],
    }  # fmt: skip
    print("| rho | way | rise of the loss | share of the meant | cosine |\n|---|---|---|---|---|")
    for rho in options.radii:
        found = {way: step(model, ids, rho, way) for way in WAYS}
        rise, wanted = found["meant"]
        for way, (own, gradient) in found.items():
            row = {"rho": rho, "way": way, "rise": own, "share": own / rise}
            row["cosine"] = float(cosine_similarity(gradient, wanted, dim=0))
            record["points"].append(row)
            print(f"| {rho} | {way} | {own:+.4f} | {own / rise:.2f} | {row['cosine']:.4f} |", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
