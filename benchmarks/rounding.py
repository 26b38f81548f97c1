"""Compares the same runs of two versions of the package, paired by seed: the effect of stochastic rounding.

    deltasam sweep configs/sweeps/evidence/rounding-0.01.yaml --output results/rounding/before   # the older version
    deltasam sweep configs/sweeps/evidence/rounding-0.01.yaml --output results/rounding/after    # the newer one
    python benchmarks/rounding.py results/rounding/before results/rounding/after

The same for rounding-0.02.yaml. Any two folders can be compared: ``results/glue results/rounding/before`` shows how
well the same settings repeat. Differences are in points, second folder minus first, with 95% bootstrap intervals and
exact paired permutation tests; Holm's correction is over the rows of a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from deltasam.lab.report import Run, holm, method_name, method_order, pooled_test, read_runs, summarize

Key = tuple[str, str, str]  # precision, method, task
Cell = dict[int, Run]  # by seed
Pairs = tuple[list[float], list[float]]

MEASURES: dict[str, Callable[[Run], float]] = {
    "score": lambda run: 100 * run.metrics[run.primary],
    "loss": lambda run: 100 * run.metrics["loss"],
}


def cells(folder: Path) -> dict[Key, Cell]:
    """The finished runs by precision, method and task, without tuning runs."""
    found: dict[Key, Cell] = {}
    for run in read_runs(folder).finished:
        precision = json.loads((run.path / "result.json").read_bytes())["config"]["precision"]
        if run.evaluation.split == "validation":
            found.setdefault((precision, run.method, run.task), {})[run.seed] = run
    return found


def paired(first: Cell, second: Cell, measure: Callable[[Run], float], *, same: bool = True) -> Pairs:
    """The values of both, by common seeds; ``same``: only runs with the same settings."""
    seeds = [s for s in sorted(first.keys() & second.keys()) if not same or first[s].settings == second[s].settings]
    return [measure(first[seed]) for seed in seeds], [measure(second[seed]) for seed in seeds]


def compared(pairs: dict[str, Pairs]) -> tuple[Any, list[float], str]:
    """The test of second minus first by task, the differences, and their mean with its interval."""
    test = pooled_test({task: (second, first) for task, (first, second) in pairs.items()})
    differences = [b - a for first, second in pairs.values() for a, b in zip(first, second, strict=True)]
    spread = summarize(differences)
    return test, differences, f"{test.difference:+.2f} [{spread.low:+.2f}, {spread.high:+.2f}]"


def row(names: Sequence[str], pairs: dict[str, Pairs]) -> tuple[list[str], float]:
    """The cells of a line, and p; all tasks count the same."""
    test, differences, interval = compared(pairs)
    means = [f"{fmean(fmean(one[side]) for one in pairs.values()):.2f}" for side in (0, 1)]
    largest, same = f"{max(map(abs, differences)):.2f}", str(differences.count(0))
    return [*names, str(test.pairs), *means, interval, largest, same], test.p


def table(first: dict[Key, Cell], second: dict[Key, Cell], measure: Callable[[Run], float]) -> str:
    lines: list[tuple[list[str], float]] = []
    keys = sorted(first.keys() & second.keys(), key=lambda key: (key[0], method_order(key[1]), key[2]))
    for precision, method in dict.fromkeys(key[:2] for key in keys):
        pairs = {
            key[2]: both for key in keys if key[:2] == (precision, method)
            if (both := paired(first[key], second[key], measure))[0]
        }  # fmt: skip
        lines += [row([precision, method_name(method), task], {task: both}) for task, both in pairs.items()]
        if len(pairs) > 1:
            lines.append(row([precision, method_name(method), "all"], pairs))
    adjusted = holm([p for _, p in lines])
    text = "| precision | method | task | pairs | first | second | difference | largest | the same | p | p, Holm |\n"
    text += "|---|---|---|---|---|---|---|---|---|---|---|\n"
    for (cells, p), corrected in zip(lines, adjusted, strict=True):
        text += f"| {' | '.join(cells)} | {p:.3f} | {corrected:.3f} |\n"
    return text


def effects(cells: dict[Key, Cell], base: str = "ERM") -> str:
    """Each method compared with plain training (in TF32), within one folder."""
    text = "| precision | method | pairs | difference to ERM | p |\n|---|---|---|---|---|\n"
    for precision, method in sorted({key[:2] for key in cells if key[1] != base}):
        pairs = {
            key[2]: both for key in sorted(cells) if key[:2] == (precision, method)
            if (both := paired(cells.get(("tf32", base, key[2]), {}), cells[key], MEASURES["score"], same=False))[0]
        }  # fmt: skip
        if pairs:
            test, _, interval = compared(pairs)
            text += f"| {precision} | {method_name(method)} | {test.pairs} | {interval} | {test.p:.3f} |\n"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="folder with the runs of the older version")
    parser.add_argument("second", type=Path, help="folder with the runs of the newer version")
    options = parser.parse_args(argv)
    first, second = cells(options.first), cells(options.second)
    for name, measure in MEASURES.items():
        print(f"### {name}, in hundredths\n\n{table(first, second, measure)}")
    for folder, found in ((options.first, first), (options.second, second)):
        print(f"### methods against ERM, {folder.name}\n\n{effects(found)}")


if __name__ == "__main__":
    main()
