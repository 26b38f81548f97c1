"""The runs of ``results/`` as frames: which runs a table shows, and at which settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from deltasam.lab.pages.statistics import interval, table
from deltasam.report import method_name, method_order, paper, read_runs

TASKS = {"mrpc": "MRPC", "rte": "RTE", "stsb": "STS-B", "cola": "CoLA", "qnli": "QNLI", "mnli": "MNLI", "qqp": "QQP",
         "sst2": "SST-2"}  # fmt: skip
SETS = {"score": "average", "sts12": "STS12", "sts13": "STS13", "sts14": "STS14", "sts15": "STS15", "sts16": "STS16",
        "stsb": "STS-B", "sickr": "SICK-R"}  # fmt: skip
ROUGES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-L"}
FIXED = {"SAM": ("rho", 0.01), "DeltaSAM": ("rho", 0.01), "PerInstanceSAM": ("rho", 0.005), "FreeLB": ("adv_lr", 0.01)}
"""The setting of a method on the larger tasks and the second encoder, where it was not chosen on the task."""

Settings = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Selection:
    """Which final runs a table shows.

    Attributes:
        folders: Where the runs are.
        fixed: Take the runs at the settings of :data:`FIXED`, instead of those that the tuning runs chose.
        tuned_only: Leave out the methods and tasks without tuning runs, except plain training.
        suffix: Appended to the names of the tasks.
    """

    folders: tuple[str, ...]
    fixed: bool = False
    tuned_only: bool = False
    suffix: str = ""


@lru_cache
def read(results: Path, *folders: str) -> pd.DataFrame:
    """One row per finished run: settings and metrics as columns, metrics times 100, whether it is a tuning run."""
    rows = []
    for run in read_runs(*(results / folder for folder in folders)).finished:
        risk = run.risk()
        rows.append(
            {
                **dict(run.settings), **{name: 100 * value for name, value in run.metrics.items()},
                "run_id": run.run_id, "task": run.task, "method": run.method, "seed": run.seed,
                "variant": run.variant, "settings": run.settings, "steps": run.steps,
                "score": 100 * run.metrics[run.primary], "best": 100 * run.best,
                "risk": np.nan if risk is None else risk["value"],
                "tuning": run.split.endswith("]") or (run.task == "mirror" and run.split == "validation"),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def order(method: str) -> tuple[int, str]:
    """Methods as the paper lists them; delta-SAM with other weights follows delta-SAM."""
    return method_order(method.partition("(")[0])[0], method


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows by task, method and seed; of several variants of a method the one with the most seeds."""
    parts = []
    for _, cell in frame.groupby(["task", "method"], sort=False):
        parts.append(cell[cell["variant"] == Counter(cell["variant"]).most_common(1)[0][0]])
    found = pd.concat(parts).drop_duplicates(["task", "method", "seed"], keep="last")
    keys = {"task": [*TASKS, "mirror", "cnn_dailymail"].index, "method": order}
    return found.sort_values(
        ["task", "method", "seed"], key=lambda column: column.map(keys.get(str(column.name), lambda value: value))
    )


def choose(tuning: pd.DataFrame) -> dict[tuple[str, str], Settings]:
    """The settings of every (task, method) with the best mean over the tuning seeds, as ``deltasam sweep`` chooses."""
    chosen = {}
    for key, cell in tuning.groupby(["task", "method"], sort=False):
        points: dict[Settings, list[float]] = {}
        for settings, score in zip(cell["settings"], cell["score"], strict=True):
            points.setdefault(settings, []).append(score)
        most = max(map(len, points.values()))
        chosen[key] = max(
            (point for point in sorted(points) if len(points[point]) == most), key=lambda p: np.mean(points[p])
        )
    return chosen


@lru_cache
def finals(results: Path, selection: Selection) -> pd.DataFrame:
    """The final runs of a selection."""
    every = read(results, *selection.folders)
    tuning, runs = every[every["tuning"]], every[~every["tuning"]]
    chosen = {} if selection.fixed else choose(tuning)
    if selection.tuned_only:
        tasks = {task for task, _ in chosen}
        runs = runs[[(t, m) in chosen or (m == "ERM" and t in tasks) for t, m in zip(runs.task, runs.method)]]
    length = runs.groupby("task")["steps"].min()

    def shown(run: pd.Series) -> bool:
        kind = run["method"].partition("(")[0]
        if run["steps"] != length[run["task"]]:
            return False  # exact per-instance runs of twice the length
        if selection.fixed:
            name, value = FIXED.get(kind, ("method", run["method"]))
            return bool(run[name] == value)
        if (run["task"], run["method"]) in chosen:
            return bool(run["settings"] == chosen[run["task"], run["method"]])
        if kind != run["method"] and (run["task"], kind) in chosen:  # other weights have delta-SAM's radius
            return bool(run["rho"] == dict(chosen[run["task"], kind])["rho"])
        return True

    return ordered(runs[runs.apply(shown, axis=1)])


def long(frame: pd.DataFrame, row: str, columns: dict[str, str]) -> pd.DataFrame:
    """A frame of runs as ``row``, ``column``, ``unit``, ``value``; one column of the table for each metric."""
    parts = [
        pd.DataFrame({"row": frame[row], "column": heading, "unit": frame["seed"], "value": frame[name]})
        for name, heading in columns.items()
    ]
    return pd.concat(parts, ignore_index=True)


def scores(results: Path, *selections: Selection, value: str = "score") -> pd.DataFrame:
    """Methods by tasks."""
    parts = []
    for selection in selections:
        runs = finals(results, selection)
        column = runs["task"].map(TASKS) + selection.suffix
        parts.append(
            pd.DataFrame({"row": runs["method"], "column": column, "unit": runs["seed"], "value": runs[value]})
        )
    frame = pd.concat(parts, ignore_index=True)
    methods = sorted(frame["row"].unique(), key=order)
    columns = list(frame["column"].unique())
    return frame.sort_values(["row", "column"], key=lambda c: c.map((methods if c.name == "row" else columns).index))


def grid(results: Path, *folders: str) -> str:
    """The tuning runs: a row for every setting that was tried, the mean over the seeds, the chosen one in bold."""
    every = read(results, *folders)
    tuning = every[every["tuning"]]
    chosen = choose(tuning)
    tasks = [task for task in TASKS if task in set(tuning["task"])]
    rows = []
    for method in sorted(tuning["method"].unique(), key=order):
        mine = tuning[tuning["method"] == method]
        names = [
            name for name, _ in mine["settings"].iloc[0] if name not in ("lr", "seed") and mine[name].nunique() > 1
        ]
        for point, cell in mine.groupby(names):
            cells = []
            for task in tasks:
                here = cell[cell["task"] == task]["score"]
                bold = (task, method) in chosen and all(
                    dict(chosen[task, method])[n] == v for n, v in zip(names, point)
                )
                cells.append("-" if here.empty else f"**{here.mean():.1f}**" if bold else f"{here.mean():.1f}")
            setting = ", ".join(f"{name} = {value:g}" for name, value in zip(names, point, strict=True))
            rows.append([method_name(method), setting, *cells])
    return table(["method", "setting", *(TASKS[task] for task in tasks)], rows)


def paper_protocol(results: Path, selection: Selection) -> str:
    """The best of the first five seeds, each at its best epoch, and the paper's figure for BERT-base."""
    frame = scores(results, selection, value="best")
    theirs, keys = paper.GLUE.figures["BERT-base"], {name: key for key, name in TASKS.items()}
    tasks, rows = list(frame["column"].unique()), []
    for method, cell in frame.groupby("row", sort=False):
        known = {} if method in ("FreeLB", "ERM+SMART", "ERM+R3F") else theirs.get(str(method), {})
        cells = []
        for task in tasks:
            best = cell[cell["column"] == task].sort_values("unit")["value"].iloc[:5].max()
            cells.append(f"{best:.1f}" + (f" ({known[keys[task]]:g})" if keys[task] in known else ""))
        rows.append([method_name(str(method)), *cells])
    return table(["method", *tasks], rows)


def gain_of_choice(results: Path, tuned: Selection, fixed: Selection) -> str:
    """The score at the setting that was chosen on the task, minus the score at the fixed one."""
    ours, theirs = finals(results, tuned), finals(results, fixed)
    tasks, rows, all_gains = list(ours["task"].unique()), [], []
    for method in sorted(ours["method"].unique(), key=order):
        cells = []
        for task in tasks:
            a, b = (f[(f["task"] == task) & (f["method"] == method)].set_index("seed") for f in (ours, theirs))
            if a["settings"].iloc[0] == b["settings"].iloc[0]:
                cells.append("=")
                continue
            gains = (a["score"] - b["score"]).dropna()
            all_gains.append(gains.mean())
            cells.append(interval(gains))
        rows += [[method_name(method), *cells]] if set(cells) != {"="} else []
    mean = f"Mean over the {len(all_gains)} choices that differ: {np.mean(all_gains):.1f} points."
    return f"{table(['method', *(TASKS[task] for task in tasks)], rows)}\n\n{mean}"


def risk(results: Path, task: str) -> pd.DataFrame:
    """Adversarial risk and accuracy; a smaller radius and a longer training are rows of their own."""
    runs = read(results, "adversarial-risk")
    runs = runs[runs["task"] == task]
    usual = runs[runs["method"] == "ERM"]["steps"].iloc[0]
    longer = np.where(runs["steps"] > usual, ", twice as long", "")
    radius = ["" if np.isnan(rho) or rho == 0.05 else f", rho = {rho:g}" for rho in runs["rho"]]
    runs = runs.assign(row=runs["method"] + radius + longer, place=runs["method"].map(order))
    runs = runs.sort_values(["place", "rho", "steps", "seed"], ascending=[True, False, True, True])
    return long(runs, "row", {"risk": "L_adv", "score": "accuracy, points"})


def row_name(row: str) -> str:
    """A method with what is special about its row after a comma."""
    method, comma, special = row.partition(", ")
    return method_name(method) + comma + special


def risk_table(results: Path, task: str) -> str:
    """Risk, accuracy, median, best, and the paper's figures. The paper trains per instance for twice the epochs."""
    theirs, rows = paper.ADVERSARIAL_RISK.figures["BERT-base"], []
    for row, cell in risk(results, task).groupby("row", sort=False):
        values = {name: list(part["value"]) for name, part in cell.groupby("column")}
        score = values["accuracy, points"]
        swapped = {"PerInstanceSAM, twice as long": "PerInstanceSAM", "PerInstanceSAM": ""}
        known = theirs.get(swapped.get(str(row), str(row)))
        of_paper = (
            "{:.2f}; {} / {}".format(*(known[f"{task} {what}"] for what in ("risk", "median", "max")))
            if known
            else "-"
        )
        rows.append([row_name(str(row)), str(len(score)), interval(values["L_adv"], 2), interval(score, 1),
                     f"{np.median(score):.1f} / {max(score):.1f}", f"{max(score[:5]):.1f}", of_paper])  # fmt: skip
    head = ["method", "seeds", "L_adv", "accuracy", "median / max", "best of 5 seeds", "paper: L_adv; median / max"]
    return table(head, rows)


def radii(results: Path) -> pd.DataFrame:
    """CoLA at every radius; plain training is a row at each of them."""
    runs = read(results, "glue", "glue-weightings", "adversarial-risk", "radius-cola")
    runs = runs[(runs["task"] == "cola") & ~runs["tuning"]]
    methods = ("SAM", "DeltaSAM", "DeltaSAM(LossWeights)", "PerInstanceSAM")
    sharp = runs[runs["method"].isin(methods)]
    parts = [sharp.assign(column=sharp["rho"].map("rho = {:g}".format))]
    places = sorted(sharp["rho"].unique())
    plain = runs[runs["method"] == "ERM"]
    parts += [plain.assign(column=f"rho = {rho:g}") for rho in places]
    found = pd.concat(parts).rename(columns={"method": "row", "seed": "unit", "score": "value"})
    columns = [f"rho = {rho:g}" for rho in places]
    return found.sort_values(
        ["row", "column", "unit"],
        key=lambda c: c.map({"row": ["ERM", *methods].index, "column": columns.index}.get(str(c.name), lambda v: v)),
    )[["row", "column", "unit", "value"]]


def eta_moves(results: Path) -> pd.DataFrame:
    """Tuning scores at each eta minus those at 1e-4, same radius and seed; radii up to 0.02, which learn every task."""
    every = read(results, "glue-eta")
    wide = every[every["tuning"] & (every["rho"] <= 0.02)].pivot(
        index=["task", "rho", "seed"], columns="eta", values="score"
    )
    moved = wide.sub(wide[1e-4], axis=0).drop(columns=1e-4).stack().rename("value").reset_index()
    moved["task"] = pd.Categorical(moved["task"], TASKS)
    moved = moved.sort_values(["eta", "task"])
    unit = moved["rho"].astype(str) + moved["seed"].astype(str)
    return pd.DataFrame({"row": moved["eta"].map("{:g}".format), "column": moved["task"].astype(str).map(TASKS),
                         "unit": unit, "value": moved["value"]})  # fmt: skip


def eta_finals(results: Path, tuned: Selection, others: Selection) -> str:
    """delta-SAM at the chosen radius and eta, and the difference to the runs of the GLUE table."""
    ours, theirs, rows = finals(results, tuned), finals(results, others), []
    for task, cell in ours[ours["method"] == "DeltaSAM"].groupby("task", sort=False):
        cells = []
        for method in ("DeltaSAM", "SAM", "ERM"):
            other = theirs[(theirs["task"] == task) & (theirs["method"] == method)]
            same = cell["settings"].iloc[0] == other["settings"].iloc[0]
            gains = (cell.set_index("seed")["score"] - other.set_index("seed")["score"]).dropna()
            cells.append("=" if same else interval(gains))
        first = cell.iloc[0]
        rows.append([TASKS[str(task)], f"{first['rho']:g}, {first['eta']:g}", interval(cell["score"], 1), *cells])
    return table(["task", "rho, eta", "delta-SAM", "minus eta = 1e-4", "minus SAM", "minus plain training"], rows)


def learning_rates(results: Path) -> str:
    """Plain training on held-out training rows; the best rates in bold."""
    rows, rates = [], [5e-05, 1e-4, 2e-4]
    for suffix, folders in (("", ("lr-glue", "lr-sst2")), (", second encoder", ("lr-minilm",))):
        means = read(results, *folders).pivot_table(index="task", columns="lr", values="score")
        for task in TASKS:
            values = means.loc[task, rates]
            best = np.isclose(values, values.max(), rtol=1e-9)
            cells = [f"**{v:.1f}**" if bold else f"{v:.1f}" for v, bold in zip(values, best, strict=True)]
            rows.append([TASKS[task] + suffix, *cells])
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
    rows = []
    for name, cell in [("without training", untrained), *runs.groupby("method", sort=False)]:
        one = cell.iloc[0]
        setting = next((f"{k} = {one[k]:g}" for k in ("rho", "adv_lr") if pd.notna(one.get(k))), "")
        cells = [interval(cell[c], 2) if n < spread else f"{cell[c].mean():.2f}" for n, c in enumerate(columns)]
        if "words" in cell:
            cells.append(f"{cell['words'].mean() / 100:.0f}")
        shown = "Mirror-BERT" if (folder, name) == ("sts", "ERM") else method_name(name)
        rows.append([shown, setting, str(len(cell)), *cells, figures.get(name, "-")])
    words = ["words"] if "words" in runs else []
    return table(["method", "setting", "seeds", *columns.values(), *words, "paper"], rows)
