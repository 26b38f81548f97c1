"""What of the sweeps in configs/sweeps/evidence has no result yet: the last section of docs/results.md."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltasam.lab.report import Run, read_runs

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))

Missing = dict[str, dict[str, tuple[int, int]]]
"""Task -> label of the method -> seeds that are there, and planned."""

SWEEPS = {
    "adversarial-risk": ("Adversarial risk", "adversarial-risk"),
    "glue": ("GLUE", "glue"),
    "glue-eta": ("GLUE, radius and eta both chosen", "glue-eta"),
    "glue-weightings-0.01": ("GLUE, delta-SAM's other weights", "glue-weightings"),
    "glue-weightings-0.02": ("GLUE, delta-SAM's other weights", "glue-weightings"),
    "radius-cola": ("CoLA, smaller radii", "radius-cola"),
    "minilm": ("GLUE, a second encoder", "minilm"),
    "minilm-stsb": ("GLUE, a second encoder", "minilm"),
    "minilm-radii": ("GLUE, a second encoder, radii chosen on it", "minilm"),
    "minilm-radii-stsb": ("GLUE, a second encoder, radii chosen on it", "minilm"),
    "minilm-qnli": ("GLUE, larger tasks on the second encoder", "minilm-larger"),
    "minilm-mnli": ("GLUE, larger tasks on the second encoder", "minilm-larger"),
    "minilm-qqp": ("GLUE, larger tasks on the second encoder", "minilm-larger"),
    "minilm-sst2": ("GLUE, larger tasks on the second encoder", "minilm-larger"),
    "glue-larger-nli": ("GLUE, larger tasks", "glue-larger"),
    "glue-larger-qqp": ("GLUE, larger tasks", "glue-larger"),
    "glue-larger-sst2": ("GLUE, larger tasks", "glue-larger"),
    "glue-larger-radii-nli": ("GLUE, larger tasks, radii chosen on them", "glue-larger"),
    "glue-larger-radii-qqp": ("GLUE, larger tasks, radii chosen on them", "glue-larger"),
    "glue-larger-radii-sst2": ("GLUE, larger tasks, radii chosen on them", "glue-larger"),
    "sts": ("Self-supervised STS", "sts"),
    "sts-untrained": ("Self-supervised STS, the encoder without training", "sts"),
    "summarization": ("Summarization", "summarization"),
    "summarization-untrained": ("Summarization, the model without training", "summarization"),
}
"""Sweep -> what it measures, and the folder of its results."""


def lines(results: Path, sweeps: Path) -> list[str]:
    """One line for every sweep whose runs are not all there; nothing for the others."""
    found = []
    for name, (what, folder) in SWEEPS.items():
        sweep = yaml.safe_load((sweeps / f"{name}.yaml").read_text(encoding="utf-8"))
        also = [results / "adversarial-risk"] if folder == "glue" else []  # plain training is the same run
        missing = missing_runs(sweep, results / folder, *also)
        if missing:
            text = told(missing, len(sweep["tasks"]), len(sweep["methods"]))
            found.append(f"- {what} (`configs/sweeps/evidence/{name}.yaml`): {text}.")
    return found


def told(missing: Missing, tasks: int, methods: int) -> str:
    """By task: the methods without any run, and those with fewer seeds than planned."""
    texts: dict[str, list[str]] = {}
    for task, labels in missing.items():
        none = [label for label, (have, _) in labels.items() if have == 0]
        parts = ["all methods" if methods > 1 else ""] if len(none) == methods else none
        few: dict[tuple[int, int], list[str]] = {}
        for label, seeds in labels.items():
            if seeds[0]:
                few.setdefault(seeds, []).append(label)
        parts += [
            f"{planned - have} of {planned} seeds of {' and '.join(each)}" for (have, planned), each in few.items()
        ]
        texts.setdefault(", ".join(parts), []).append(common["TASKS"].get(task, task))
    if tasks == 1:
        return next(iter(texts)) or "not run"
    return "; ".join(f"{', '.join(where)}: {what}" for what, where in texts.items())


def missing_runs(sweep: Mapping[str, Any], *folders: Path) -> Missing:
    """Task -> label of the method -> seeds that are there, and planned; only where there are too few.

    Runs that chose a setting do not count, nor do runs at a setting that was not chosen.
    """
    every = read_runs(*folders).finished
    chosen = common["chosen_points"](run for run in every if tuned(run))
    runs = [(run, common["config"](run)) for run in every if not tuned(run)]
    found: Missing = {}
    for task in sweep["tasks"]:
        task = task if isinstance(task, dict) else {"name": task}
        name = task["name"]
        rows = task.get("train_rows")
        here = [(r, config) for r, config in runs if r.task == name and config["task"]["train_rows"] == rows]
        for label, own, free in points(sweep):
            given = without({"method": own} if isinstance(own, str) else own, free)
            seeds = {
                run.seed
                for run, config in here
                if fits(config, given, sweep.get("common", {}))
                if not free or run.settings == chosen.get((name, run.method))
            } & set(sweep["seeds"])
            if len(seeds) < len(sweep["seeds"]):
                found.setdefault(name, {})[label] = (len(seeds), len(sweep["seeds"]))
    return found


def points(sweep: Mapping[str, Any]) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Label, sections and grid of every method; where nothing is chosen, every radius of its grid by itself."""
    for label, own in sweep["methods"].items():
        free = sweep.get("grid", {}).get(label, {})
        radii = [] if "tune" in sweep else free.get("method.rho", [])
        for rho in radii:
            yield f"{label} at {rho:g}", {**own, "method": {**own["method"], "rho": rho}}, {}
        if not radii:
            yield label, own, free


def without(own: Mapping[str, Any], grid: Mapping[str, Any]) -> Mapping[str, Any]:
    """A method of the sweep without the options that its grid sets."""
    method = own.get("method")
    if not isinstance(method, dict):
        return own
    return {**own, "method": {name: value for name, value in method.items() if f"method.{name}" not in grid}}


def tuned(run: Run) -> bool:
    """Whether it only chose a setting."""
    return run.split.endswith("]") or (run.task == "mirror" and run.split == "validation")


def fits(config: Mapping[str, Any], own: Mapping[str, Any], shared: Mapping[str, Any]) -> bool:
    """Whether a run is one of this method of the sweep: method, weights, regularisers, epochs, learning rate."""
    method = own.get("method", "ERM")
    method = {"name": method} if isinstance(method, str) else dict(method)
    weighting = method.pop("weighting", {"name": "FiniteDifference"})
    ran = config["method"]
    if any(ran.get(name) != value for name, value in method.items()):
        return False
    if "weighting" in ran and ran["weighting"]["name"] != weighting["name"]:
        return False
    regularisers = [each["name"] for each in own.get("regularisers", [])]
    if regularisers != [each["name"] for each in config["regularisers"]]:
        return False
    for section in ("schedule", "optimizer"):
        wanted = {**shared.get(section, {}), **own.get(section, {})}
        if any(config[section][name] != value for name, value in wanted.items() if name in ("epochs", "steps", "lr")):
            return False
    return True
