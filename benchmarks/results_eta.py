"""The section of docs/results.md on eta, the floor of the denominator of Eq. 5: how often it is reached."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))
table, with_interval, TASKS = (common[name] for name in ("table", "with_interval", "TASKS"))

ABOUT = """The paper's grid for GLUE has four values of eta, the least that the denominator |l_i(w + r) - l_i(w - r)|
of Eq. 5 may be. *At the floor*: the share of the instances whose denominator is eta, with 95% intervals over the
batches, at the smallest and the largest of the four. Where all are there, g is the second difference over a constant,
and since the perturbation is scaled to rho afterwards, a larger eta changes nothing. *Update*: cosine of the update at
the largest eta with the one at the smallest. The models are those of the sections above (plain training), {rows}
training rows in batches of {batch}, without dropout, float32, {device}, commit {commit}.

{commands}"""
COMMANDS = {
    "mrpc": "    python benchmarks/weights_eta.py",
    "cola": "    python benchmarks/weights_eta.py --sweep configs/sweeps/evidence/weights-cola.yaml",
}


def eta_section(results: Path) -> str:
    """A row for every model and radius; nothing where nothing was measured."""
    files = sorted((results / "weights-eta").glob("*-erm-*.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not found:
        return ""
    found.sort(key=lambda each: (list(TASKS).index(each["task"]), each["updates"]))
    etas = sorted(next(iter(found[0]["eta"].values())), key=float)
    least, most = etas[0], etas[-1]
    rows = [
        [
            TASKS[each["task"]], str(each["updates"]), rho, with_interval(lines[least]["floor"], 2),
            with_interval(lines[most]["floor"], 2), with_interval(lines[most]["cosine"], 3),
        ]
        for each in found
        for rho, lines in each["eta"].items()
    ]  # fmt: skip
    first = found[0]
    about = ABOUT.format(
        rows=first["rows"], batch=first["batch"], device=str(first["device"]).partition(",")[0],
        commit=str(first["commit"])[:7], commands="\n".join(COMMANDS[task] for task in COMMANDS if any(
            each["task"] == task for each in found
        )),
    )  # fmt: skip
    head = ["task", "updates", "rho", f"at the floor, eta = {float(least):g}", f"eta = {float(most):g}", "update"]
    return "\n\n".join(["### Does eta matter?", about, table(head, rows)])
