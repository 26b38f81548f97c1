"""How many operations the host launches in one eager step: on a fast GPU, its time depends on this number.

    PYTHONPATH=src python benchmarks/operations.py --model bert-base --size 16x64 --precision bf16

Needs torch and transformers. Counts the operations that torch dispatches, without those that launch nothing (views,
new memory), and without kernels of Triton, which are few. A step on a GPU takes other operations than one on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltasam.lab.bench import candidates, prepared
from deltasam.lab.bench.options import StepOptions
from deltasam.lab.commit import commit

NOTHING = {"detach", "_unsafe_view", "empty", "empty_like", "new_empty", "set_"}
METHODS = ("delta-sam-ambient", "per-instance-sam")


class Operations(TorchDispatchMode):
    """Counts the operations inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and (name := func.overloadpacket.__name__) not in NOTHING:
            self.counts[name] += 1
        return result


def main(argv: Sequence[str] | None = None) -> None:
    """Counts the operations of ERM, SAM and the given methods, prints them, and writes a file."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--size", default="16x64", metavar="NxT")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--top", type=int, default=12, help="number of operations to list")
    parser.add_argument("--out", type=Path, default=Path("results/speed/operations"), help="folder of the file")
    options = parser.parse_args(given)
    batch, length = map(int, options.size.split("x"))
    shape = StepOptions(
        model=options.model, batch=batch, length=length, precision=options.precision, device=options.device
    )
    rows = []
    for entry, work in prepared(shape, candidates(tuple(options.methods), third_party=False, embeddings=True)):
        with Operations() as found:
            work()
        rows.append({"name": entry.name, "operations": found.counts.total(), "counts": dict(found.counts)})
        often = ", ".join(f"{name} {count}" for name, count in found.counts.most_common(options.top))
        print(f"{entry.name}: {found.counts.total()} operations: {often}", flush=True)
    known = {name: value for name, value in vars(options).items() if name != "out"}  # a path of this machine
    shown = [word for word in given if word not in ("--out", str(options.out))]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    record = {
        "part": "operations", "command": shlex.join(["python", "benchmarks/operations.py", *shown]),
        "options": known, "rows": rows,
        "machine": {"device": device, "torch": torch.__version__, "commit": commit()},
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.model}-{options.size}-{options.precision}.json"
    file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
