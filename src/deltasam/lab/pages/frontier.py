"""The arms of ``frontier*.yaml``: differences to plain training and what they cost, as tables and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from matplotlib import rc_context

from deltasam.lab.pages.figures import GREEN, GREY, ORANGE, STYLE, panels, svg
from deltasam.lab.pages.runs import TASKS, read
from deltasam.lab.pages.statistics import Ends, difference, interval, series, stratified_interval, table
from deltasam.lab.report import method_name

ENCODER = ("frontier", "frontier-classes")
LLM = ("frontier-llm",)
PLAIN = "ERM"
_METRICS = {"accuracy": "accuracy", "nll": "NLL x 100", "ece": "ECE x 100", "forgetting": "forgetting x 100",
            "accuracy_4bit": "4 bits"}  # fmt: skip

Differences = Mapping[str, list[float]]
"""Column -> differences to plain training, one per seed."""


def _planned(root: Path, sweeps: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Arm, task and id of every run of the sweeps that exist."""
    from deltasam.lab.sweeps import final_runs, read_sweep

    names: dict[str, list[str]] = {}
    for name in sweeps:
        file = root / "configs" / "sweeps" / "evidence" / f"{name}.yaml"
        for run in final_runs(read_sweep(file), {}) if file.is_file() else ():
            base = ", frozen weights" if run.config.method.params == "base" else ""
            called = method_name("+".join(run.config.arm)) + base
            labels = names.setdefault(called, [])
            if run.method not in labels:
                labels.append(run.method)
            # A second setting of a method has the name that it has in the sweep file, too.
            arm = called if labels[0] == run.method else f"{called} ({run.method})"
            yield arm, run.config.task.name, run.config.run_id


def arms(results: Path, sweeps: tuple[str, ...]) -> pd.DataFrame:
    """One row per planned run: arm, task, id, and what was measured; nothing where the run is missing.

    A run that is in the folder of the sweep and in ``pays`` or ``glue``, too, is taken from the first of them.
    """
    runs = pd.DataFrame(_planned(results.parent, sweeps), columns=["arm", "task", "run_id"])
    known = read(results, sweeps[0], "pays", "glue")
    return runs.merge(known.drop(columns="task"), on="run_id", how="left")


def _differences(frame: pd.DataFrame) -> dict[str, Differences]:
    """Arm -> differences by column, for every planned arm except plain training, also without any run."""
    cells, columns = series(frame.dropna()), list(frame["column"].unique())
    others = [arm for arm in frame["row"].unique() if arm != PLAIN]
    return {
        arm: {column: found for column in columns if (found := difference(cells, arm, PLAIN, column))}
        for arm in others
    }


def _by_task(runs: pd.DataFrame) -> pd.DataFrame:
    tasks = runs["task"].map(TASKS)
    return pd.DataFrame({"row": runs["arm"], "column": tasks, "unit": runs["seed"], "value": runs["score"]})


def _passes(runs: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Arm -> forward and backward passes per update, of the arms with runs."""
    counts = runs.dropna(subset="steps").groupby("arm", sort=False)[["forwards", "backwards", "steps"]].sum()
    return {
        str(arm): (row["forwards"] / row["steps"], row["backwards"] / row["steps"]) for arm, row in counts.iterrows()
    }


def _cell(found: list[float], planned: int) -> str:
    return interval(found) + ("" if len(found) == planned else f" (n = {len(found)})") if found else "-"


def _mean(found: Differences, tasks: int) -> str:
    """The mean over the tasks, each of which counts the same; with the number of tasks if some are missing."""
    if not found:
        return "-"
    count = "" if len(found) == tasks else f" ({len(found)} of {tasks} tasks)"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*stratified_interval(found)) + count


def encoder_table(results: Path) -> str:
    """Arms by tasks: the difference to plain training, paired by seed, the mean over the tasks, and the passes."""
    runs = arms(results, ENCODER)
    found, passes = _differences(_by_task(runs)), _passes(runs)
    planned = runs.groupby(["arm", "task"]).size().max()
    tasks = list(dict.fromkeys(runs["task"].map(TASKS)))
    rows = [
        [arm, "{:.2g} / {:.2g}".format(*passes[arm]) if arm in passes else "-",
         *(_cell(at.get(task, []), planned) for task in tasks), _mean(at, len(tasks))]
        for arm, at in found.items()
    ]  # fmt: skip
    return table(["method", "passes", *tasks, "mean over the tasks"], rows)


def llm_table(results: Path) -> str:
    """Arms by metrics: plain training, and the differences of the others to it, paired by seed."""
    runs = arms(results, LLM)
    parts = [
        pd.DataFrame({"row": runs["arm"], "column": name, "unit": runs["seed"], "value": runs.get(metric)})
        for metric, name in _METRICS.items()
    ]
    planned = runs.groupby("arm").size().max()
    rows = [
        [arm, *(_cell(at.get(name, []), planned) for name in _METRICS.values())]
        for arm, at in _differences(pd.concat(parts)).items()
    ]
    plain = runs[runs["arm"] == PLAIN]
    means = [plain[name].mean() if name in plain else float("nan") for name in _METRICS]
    first = [PLAIN, *("-" if pd.isna(mean) else f"{mean:.2f}" for mean in means)]
    return table(["difference to ERM", *_METRICS.values()], [first, *rows])


@rc_context(STYLE)
def figure(results: Path) -> str:
    """The mean difference to plain training over the tasks, with its interval, in groups of equal cost.

    The cost is that of the passes, a backward pass counted as two forward passes, relative to plain training. Arms
    without runs are left out; those that lack a task are hollow, because their mean is not that of the others.
    """
    runs = arms(results, ENCODER)
    passes = _passes(runs)
    cost = {arm: round((forwards + 2 * backwards) / 3, 1) for arm, (forwards, backwards) in passes.items()}
    found = {arm: at for arm, at in _differences(_by_task(runs)).items() if at}
    means: dict[str, Ends] = {arm: stratified_interval(at) for arm, at in found.items()}
    tasks = runs["task"].nunique()
    order = sorted(means, key=lambda arm: (cost[arm], -means[arm][0]))
    (each,) = panels(1, (8.4, 4.0))
    for place, arm in enumerate(order):
        mean, low, high = means[arm]
        colour = GREEN if low > 0 else ORANGE if high < 0 else GREY
        each.plot([place, place], [low, high], color=colour, linewidth=1.5)
        inside = colour if len(found[arm]) == tasks else "none"
        each.plot(place, mean, "o", color=colour, markerfacecolor=inside, markersize=5)
    for group in dict.fromkeys(cost[arm] for arm in order):
        places = [place for place, arm in enumerate(order) if cost[arm] == group]
        each.text(sum(places) / len(places), 1.0, f"x {group:g}", transform=each.get_xaxis_transform(), ha="center")
        if places[0]:
            each.axvline(places[0] - 0.5, color=GREY, linewidth=0.5, linestyle=":")
    each.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    each.set_xticks(range(len(order)), order, rotation=40, ha="right")
    each.set(ylabel="points above plain training", xlim=(-0.5, max(len(order), 1) - 0.5))
    each.set_title("cost of an update, relative to plain training (hollow: a task is missing)", pad=16)
    return svg(each.figure, {arm: (cost[arm], len(found[arm]), *means[arm]) for arm in order})
