"""What the scripts for one model and one size of batch share: their options, and the head of their records."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from deltasam.lab.bench.options import StepOptions
from deltasam.lab.commit import commit


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of the shape; a script adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--size", default="16x64", metavar="NxT")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser


def shape_of(options: argparse.Namespace, **more: Any) -> StepOptions:
    """The options of a step of this shape."""
    batch, length = map(int, options.size.split("x"))
    return StepOptions(
        model=options.model, batch=batch, length=length, precision=options.precision, device=options.device, **more
    )


def name_of(options: argparse.Namespace) -> str:
    """The shape in the name of a file."""
    return f"{options.model}-{options.size}-{options.precision}"


def record_of(part: str, script: str, words: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Where a measurement comes from: the part of the page, the command without its folder, and the machine."""
    shown = [word for word in words if word not in ("--out", str(options.out))]  # a path of this machine
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return {
        "part": part,
        "command": shlex.join(["python", f"benchmarks/{script}", *shown]),
        "options": {"model": options.model, "size": options.size, "precision": options.precision},
        "machine": {"device": device, "torch": torch.__version__, "commit": commit()},
    }
