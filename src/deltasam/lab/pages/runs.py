"""The runs of ``results/`` as frames: which runs a table shows, and at which settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deltasam.lab.pages.statistics import interval, table
from deltasam.lab.report import method_name, method_order, paper, read_runs

TASKS = {"mrpc": "MRPC", "rte": "RTE", "stsb": "STS-B", "cola": "CoLA", "qnli": "QNLI", "mnli": "MNLI", "qqp": "QQP",
         "sst2": "SST-2"}  # fmt: skip
SETS = {"score": "average", **paper.STS_SETS}
FIXED = {"SAM": ("rho", 0.01), "DeltaSAM": ("rho", 0.01), "PerInstanceSAM": ("rho", 0.005), "FreeLB": ("adv_lr", 0.01)}
"""The setting of a method on the larger tasks and the second encoder, if it was not chosen on the task."""

Settings = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Selection:
    """Which final runs a table shows.

    Attributes:
        folders: Where the runs are.
        fixed: Take the runs at the settings of :data:`FIXED`, instead of those that the tuning runs chose.
        tuned_only: Leave out the methods and tasks without tuning runs, except plain training.
        task_suffix: Appended to the names of the tasks,
        method_suffix: and to those of the methods.
    """

    folders: tuple[str, ...]
    fixed: bool = False
    tuned_only: bool = False
    task_suffix: str = ""
    method_suffix: str = ""


@lru_cache
def read(results: Path, *folders: str) -> pd.DataFrame:
    """One row per finished run of the folders; of a run that is in several of them, that in the first."""
    frames = [frame for folder in folders if not (frame := _read(results, folder)).empty]
    return pd.concat(frames, ignore_index=True).drop_duplicates("run_id") if frames else pd.DataFrame()


@lru_cache
def _read(results: Path, folder: str) -> pd.DataFrame:
    """One row per finished run: settings and metrics as columns, metrics times 100, whether it is a tuning run."""
    rows = []
    for run in read_runs(results / folder).finished:
        risk = run.risk()
        rows.append(
            {
                **dict(run.settings), **{name: 100 * value for name, value in run.metrics.items()},
                "run_id": run.run_id, "task": run.task, "method": run.method, "seed": run.seed,
                "first": "bert-small-wiki" in run.model,
                "variant": run.variant, "settings": run.settings, "steps": run.steps,
                "forwards": run.forwards, "backwards": run.backwards,
                "score": 100 * run.metrics[run.primary], "best": 100 * run.best,
                "risk": np.nan if risk is None else risk["value"],
                "tuning": run.evaluation.is_part or (run.task, run.evaluation.split) == ("mirror", "validation"),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def order(method: str) -> tuple[int, str]:
    """Methods as the paper lists them; delta-SAM with other weights follows delta-SAM."""
    return method_order(method.partition("(")[0])[0], method


def ordered(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows by method, task and seed; of several variants of a method on a task, the one with the most seeds."""
    cells = [
        cell[cell["variant"] == Counter(cell["variant"]).most_common(1)[0][0]]
        for _, cell in runs.groupby(["task", "method"], sort=False)
    ]
    keys = {"method": order, "task": [*TASKS, "mirror", "cnn_dailymail"].index}
    return pd.concat(cells).sort_values(
        ["method", "task", "seed"], key=lambda c: c.map(keys[str(c.name)]) if c.name in keys else c
    )


def choose(tuning: pd.DataFrame) -> dict[tuple[str, str], Settings]:
    """The settings of every (task, method) with the best mean over the tuning seeds, as ``deltasam sweep`` chooses."""
    chosen: dict[Any, Settings] = {}
    for key, cell in tuning.groupby(["task", "method"], sort=False):
        points: dict[Settings, list[float]] = {}
        for settings, score in zip(cell["settings"], cell["score"], strict=True):
            points.setdefault(settings, []).append(score)
        most = max(map(len, points.values()))
        complete = [point for point in sorted(points) if len(points[point]) == most]
        chosen[key] = max(complete, key=lambda point: np.mean(points[point]))
    return chosen


@lru_cache
def finals(results: Path, selection: Selection) -> pd.DataFrame:
    """The final runs of a selection."""
    every = read(results, *selection.folders)
    runs, chosen = every[~every["tuning"]], {} if selection.fixed else choose(every[every["tuning"]])
    length = runs.groupby("task")["steps"].min()
    tasks = {task for task, _ in chosen}

    def shown(run: pd.Series) -> bool:
        task, method, settings = run["task"], run["method"], dict(run["settings"])
        kind = method.partition("(")[0]
        if run["steps"] != length[task]:
            return False  # exact per-instance runs of twice the length
        if selection.fixed and kind in FIXED:
            return settings[FIXED[kind][0]] == FIXED[kind][1]
        if (task, method) in chosen:
            return settings == dict(chosen[task, method])
        if selection.tuned_only:
            return method == "ERM" and task in tasks
        if (task, kind) in chosen:  # other weights have the radius of delta-SAM
            return settings["rho"] == dict(chosen[task, kind])["rho"]
        return True

    return ordered(runs[runs.apply(shown, axis=1)])


def long(runs: pd.DataFrame, rows: Any, columns: Any, value: str = "score") -> pd.DataFrame:
    """Runs as ``row``, ``column``, ``unit``, ``value``."""
    return pd.DataFrame({"row": rows, "column": columns, "unit": runs["seed"], "value": runs[value]})


def scores(results: Path, *selections: Selection) -> pd.DataFrame:
    """Methods by tasks."""
    parts = []
    for each in selections:
        runs = finals(results, each)
        parts.append(long(runs, runs["method"] + each.method_suffix, runs["task"].map(TASKS) + each.task_suffix))
    return pd.concat(parts)


def by_metric(runs: pd.DataFrame, columns: dict[str, str], rows: str = "method") -> pd.DataFrame:
    """Methods by metrics."""
    return pd.concat([long(runs, runs[rows], heading, metric) for metric, heading in columns.items()])


def row_name(row: str) -> str:
    """A method, with the settings of its row after a comma."""
    method, comma, special = row.partition(", ")
    return method_name(method) + comma + special


def grid(results: Path, selection: Selection) -> str:
    """The tuning runs: a row for every setting that was tried, the mean over the seeds, the chosen one in bold."""
    every = read(results, *selection.folders)
    tuning = every[every["tuning"]]
    chosen, tasks, rows = choose(tuning), [task for task in TASKS if task in set(tuning["task"])], []
    for method in sorted(tuning["method"].unique(), key=order):
        mine = tuning[tuning["method"] == method]
        names = [
            name for name, _ in mine["settings"].iloc[0] if name not in ("lr", "seed") and mine[name].nunique() > 1
        ]
        for values, cell in mine.groupby(names):
            point = dict(zip(names, values, strict=True))
            cells = []
            for task in tasks:
                mean = cell[cell["task"] == task]["score"].mean()
                bold = point.items() <= dict(chosen[task, method]).items() if (task, method) in chosen else False
                cells.append("-" if np.isnan(mean) else f"**{mean:.1f}**" if bold else f"{mean:.1f}")
            rows.append([method_name(method), ", ".join(f"{name} = {v:g}" for name, v in point.items()), *cells])
    return table(["method", "setting", *(TASKS[task] for task in tasks)], rows)


def paper_protocol(results: Path, selection: Selection) -> str:
    """The best of the first five seeds, each at its best epoch, and the paper's figure for BERT-base."""
    runs, rows = finals(results, selection), []
    tasks = list(runs["task"].unique())
    for method, cell in runs.groupby("method", sort=False):
        known = paper.GLUE.figures["BERT-base"].get(str(method), {})
        best = {task: part["best"].iloc[:5].max() for task, part in cell.groupby("task")}
        cells = [f"{best[task]:.1f}" + (f" ({known[task]:g})" if task in known else "") for task in tasks]
        rows.append([method_name(str(method)), *cells])
    return table(["method", *(TASKS[task] for task in tasks)], rows)


def risk(results: Path, task: str) -> pd.DataFrame:
    """Adversarial risk and accuracy; runs with a smaller radius or a longer training have separate rows."""
    runs = read(results, "adversarial-risk")
    runs = runs[runs["task"] == task]
    longer = np.where(runs["steps"] > runs["steps"].min(), ", twice as long", "")
    radius = ["" if np.isnan(rho) or rho == 0.05 else f", rho = {rho:g}" for rho in runs["rho"]]
    runs = runs.assign(row=runs["method"] + radius + longer, place=runs["method"].map(order))
    runs = runs.sort_values(["place", "rho", "steps", "seed"], ascending=[True, False, True, True])
    return by_metric(runs, {"risk": "L_adv", "score": "accuracy, points"}, "row")


def risk_table(results: Path, task: str) -> str:
    """Risk, accuracy, median, best, and the paper's figures. The paper trains per instance for twice the epochs."""
    theirs, rows = paper.ADVERSARIAL_RISK.figures["BERT-base"], []
    swapped = {"PerInstanceSAM, twice as long": "PerInstanceSAM", "PerInstanceSAM": ""}
    for row, cell in risk(results, task).groupby("row", sort=False):
        values = {name: list(part["value"]) for name, part in cell.groupby("column")}
        score = values["accuracy, points"]
        known = theirs.get(swapped.get(str(row), str(row)), {})
        figures = [known[f"{task} {what}"] for what in ("risk", "median", "max")] if known else []
        rows.append([
            row_name(str(row)), str(len(score)), interval(values["L_adv"], 2), interval(score, 1),
            f"{np.median(score):.1f} / {max(score):.1f}", f"{max(score[:5]):.1f}",
            f"{figures[0]:.2f}; {figures[1]} / {figures[2]}" if known else "-",
        ])  # fmt: skip
    head = ["method", "seeds", "L_adv", "accuracy", "median / max", "best of 5 seeds", "paper: L_adv; median / max"]
    return table(head, rows)


def radii(results: Path) -> pd.DataFrame:
    """CoLA at every radius; plain training is a row at each of them."""
    runs = read(results, "glue", "glue-weightings", "adversarial-risk", "radius-cola")
    runs = runs[(runs["task"] == "cola") & ~runs["tuning"]]
    plain = runs[runs["method"] == "ERM"]
    sharp = runs[runs["method"].isin(["SAM", "DeltaSAM", "DeltaSAM(LossWeights)", "PerInstanceSAM"])]
    sharp = sharp.sort_values(["method", "rho", "seed"], key=lambda c: c.map(order) if c.name == "method" else c)
    parts = [long(plain, "ERM", f"rho = {rho:g}") for rho in sorted(sharp["rho"].unique())]
    return pd.concat([*parts, long(sharp, sharp["method"], sharp["rho"].map("rho = {:g}".format))])


def eta_moves(results: Path) -> pd.DataFrame:
    """Tuning scores minus those at eta = 1e-4, same radius and seed; radii up to 0.02, which learn every task."""
    every = read(results, "glue-eta")
    wide = every[every["tuning"] & (every["rho"] <= 0.02)].pivot(
        index=["task", "rho", "seed"], columns="eta", values="score"
    )
    moved = wide.sub(wide[1e-4], axis=0).drop(columns=1e-4).stack().rename("value").reset_index()
    moved = moved.sort_values(["eta", "task"], key=lambda c: c.map([*TASKS].index) if c.name == "task" else c)
    unit = moved["rho"].astype(str) + moved["seed"].astype(str)
    return moved.assign(row=moved["eta"].map("{:g}".format), column=moved["task"].map(TASKS), unit=unit)


def learning_rates(results: Path) -> str:
    """Plain training on held-out training rows; the best rates in bold."""
    rows, rates = [], [5e-05, 1e-4, 2e-4]
    for suffix, folders in (("", ("lr-glue", "lr-sst2")), (", second encoder", ("lr-minilm",))):
        means = read(results, *folders).pivot_table(index="task", columns="lr", values="score")
        for task, name in TASKS.items():
            values = means.loc[task, rates]
            best = np.isclose(values, values.max(), rtol=1e-9)
            cells = [f"**{v:.1f}**" if bold else f"{v:.1f}" for v, bold in zip(values, best, strict=True)]
            rows.append([name + suffix, *cells])
    return table(["task", *(f"{rate:g}" for rate in rates)], rows)


def trained(results: Path, folder: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The final runs of STS or summarization at the chosen settings, and the run of the untrained model."""
    every = read(results, folder)
    chosen, runs = choose(every[every["tuning"]]), every[~every["tuning"]]
    cells = zip(runs["task"], runs["method"], runs["settings"], runs["lr"], strict=True)
    shown = [lr > 0 and settings == chosen.get((task, method), settings) for task, method, settings, lr in cells]
    return ordered(runs[shown]), runs[runs["lr"] == 0]


def trained_table(results: Path, folder: str, columns: dict[str, str], figures: dict[str, str], spread: int) -> str:
    """Means over the seeds: the first ``spread`` columns with intervals, the chosen setting, the paper's figures."""
    runs, untrained = trained(results, folder)
    words, rows = ["words"] if "words" in runs else [], []
    for name, cell in [("without training", untrained), *runs.groupby("method", sort=False)]:
        one = cell.iloc[0]
        setting = next((f"{k} = {one[k]:g}" for k in ("rho", "adv_lr") if pd.notna(one.get(k))), "")
        cells = [interval(cell[c], 2) if n < spread else f"{cell[c].mean():.2f}" for n, c in enumerate(columns)]
        cells += [f"{cell[word].mean() / 100:.0f}" for word in words]
        shown = "Mirror-BERT" if (folder, name) == ("sts", "ERM") else method_name(name)
        rows.append([shown, setting, str(len(cell)), *cells, figures.get(name, "-")])
    return table(["method", "setting", "seeds", *columns.values(), *words, "paper"], rows)
