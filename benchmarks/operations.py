"""How many operations the host launches in one eager step: on a fast GPU, its time depends on this number.

    PYTHONPATH=src python benchmarks/operations.py --model bert-base --size 16x64 --precision bf16

Needs torch and transformers. Counts the operations that torch dispatches, without those that launch nothing (views,
new memory), and without kernels of Triton, which are few. A step on a GPU takes other operations than one on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from one_shape import name_of, parser_of, record_of, shape_of
from torch.utils._python_dispatch import TorchDispatchMode

from deltasam.lab.bench import candidates, prepared

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
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--top", type=int, default=12, help="number of operations to list")
    parser.add_argument("--out", type=Path, default=Path("results/speed/operations"), help="folder of the file")
    options = parser.parse_args(given)
    rows = []
    for entry, work in prepared(
        shape_of(options), candidates(tuple(options.methods), third_party=False, embeddings=True)
    ):
        with Operations() as found:
            work()
        rows.append({"name": entry.name, "operations": found.counts.total(), "counts": dict(found.counts)})
        often = ", ".join(f"{name} {count}" for name, count in found.counts.most_common(options.top))
        print(f"{entry.name}: {found.counts.total()} operations: {often}", flush=True)
    record = {**record_of("operations", "operations.py", given, options), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name_of(options)}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
