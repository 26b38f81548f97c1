"""The default radius against radii chosen per task, and rules for the radius, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from deltasam.lab.pages.evidence import clean, topic
from deltasam.lab.pages.runs import TASKS, choose, read
from deltasam.lab.pages.statistics import interval, stratified_interval, table

DEFAULT = 0.01
_ENCODERS = {"first encoder": ("glue", "glue-weightings", "adversarial-risk", "glue-larger", "frontier"),
             "second encoder": ("minilm", "minilm-larger")}  # fmt: skip
_SHARE = "SAM(LossShare 0.01)"

BySeed = Mapping[int, float]


def default_table(results: Path) -> str:
    """SAM at the default radius: differences to plain training and to the radius chosen on the training rows."""
    rows, to_plain, to_chosen = [], {}, {}
    for encoder, folders in _ENCODERS.items():
        every = read(results, *folders)
        if encoder == "first encoder":
            every = pd.concat([every, _of_whole_sets(results)]).drop_duplicates("run_id")
        chosen = choose(every[every["tuning"] & (every["method"] == "SAM")])
        shares = read(results, "radius-default")
        own = shares[shares["method"].eq(_SHARE) & shares["first"].eq(encoder == "first encoder")]
        for task, name in TASKS.items():
            runs = every[~every["tuning"] & (every["task"] == task)]
            plain = _by_seed(runs[runs["method"] == "ERM"])
            default = _by_seed(runs[(runs["method"] == "SAM") & (runs["rho"] == DEFAULT)])
            rho = dict(chosen.get((task, "SAM"), ())).get("rho")
            tuned = {} if rho is None else _by_seed(runs[(runs["method"] == "SAM") & (runs["rho"] == rho)])
            share = _by_seed(own[own["task"] == task])
            cells = [_paired(default, plain), _paired(default, tuned), _paired(share, plain)]
            label = f"{name}, {encoder}"
            if cells[0]:
                to_plain[label] = cells[0]
            if cells[0] and (cells[1] or rho is None):
                to_chosen[label] = cells[1] or [0.0]
            shown = ["0 (the same)" if k == 1 and rho == DEFAULT else _shown(c) for k, c in enumerate(cells)]
            rows.append([label, shown[0], "-" if rho is None else f"{rho:g}", *shown[1:]])
    chosen_only = {label: values for label, values in to_chosen.items() if values != [0.0]}
    rows.append(["mean", _pooled(to_plain), "", _pooled(chosen_only), ""])
    head = ["task", "SAM at 0.01 - plain", "radius chosen", "SAM at 0.01 - at the chosen radius", "share 0.01 - plain"]
    return table(head, rows)


def _of_whole_sets(results: Path) -> pd.DataFrame:
    """The runs of ``pays`` with all rows and their own labels, of the first encoder."""
    frame = clean(topic(results, "pays"))
    ids = frame[frame["model"].eq("bert-small-wiki") & ~frame["setup"].str.contains("rows")]["run_id"]
    known = read(results, "pays")
    return known[known["run_id"].isin(ids)] if len(known) else known


def rules_table(results: Path) -> str:
    """Every rule of ``radius-rules*.yaml``: difference to plain training by task, two seeds each, and the mean."""
    runs = read(results, "radius-rules")
    columns = [(task, first) for task, first in _columns(runs)]
    plain = {cell: _by_seed(_cell(runs, "ERM", cell)) for cell in columns}
    arms: dict[str, dict[tuple[str, bool], Sequence[float]]] = {}
    for (method, settings), _ in runs[runs["method"] != "ERM"].groupby(["method", "settings"], sort=False):
        rho = dict(settings).get("rho")
        label = f"{method} {rho:g}" if rho is not None else str(method)
        found = runs[(runs["method"] == method) & (runs["settings"] == settings)]
        arms[label] = {cell: _paired(_by_seed(_of(found, cell)), plain[cell]) for cell in columns}
    rows = []
    for label in sorted(arms):
        means = [sum(values) / len(values) for values in arms[label].values() if values]
        cells = [f"{sum(v) / len(v):.1f}" if v else "-" for v in arms[label].values()]
        rows.append([label, *cells, f"{sum(means) / len(means):.2f}"])
    head = [f"{TASKS[task]}{'' if first else ', second encoder'}" for task, first in columns]
    return table(["difference to plain training", *head, "mean"], rows)


def units_table(results: Path) -> str:
    """Loss over gradient norm at the start, in the middle and at the end of short trainings, and the weights' norm."""
    lines = pd.read_json(results / "radius-units" / "units.jsonl", lines=True)
    rows = []
    for (task, model, mode), run in lines.groupby(["task", "model", "mode"], sort=False):
        times = run.sort_values("t")
        at = [times.iloc[0], times.iloc[len(times) // 2], times.iloc[-1]]
        shares = " / ".join(f"{one['loss'] / one['gn']:.2g}" for one in at)
        own = " / ".join(f"{one['share_med']:.2g}" for one in at)
        what = {"full": "", "adapters": ", adapters", "base": ", frozen matrices"}[mode]
        rows.append([f"{TASKS.get(task, 'MNLI as prompts')}, {model}{what}", shares, own, f"{at[-1]['wn']:.0f}"])
    head = ["training", "loss / gradient norm of the batch", "of single instances, median", "norm of the weights"]
    return table(head, rows)


def _columns(runs: pd.DataFrame) -> list[tuple[str, bool]]:
    return sorted(
        {(task, bool(first)) for task, first in zip(runs["task"], runs["first"], strict=True)},
        key=lambda cell: (not cell[1], [*TASKS].index(cell[0])),
    )


def _of(runs: pd.DataFrame, cell: tuple[str, bool]) -> pd.DataFrame:
    return runs[(runs["task"] == cell[0]) & (runs["first"] == cell[1])]


def _cell(runs: pd.DataFrame, method: str, cell: tuple[str, bool]) -> pd.DataFrame:
    return _of(runs[runs["method"] == method], cell)


def _by_seed(runs: pd.DataFrame) -> BySeed:
    return dict(zip(runs["seed"], runs["score"], strict=True))


def _paired(first: BySeed, second: BySeed) -> list[float]:
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def _shown(values: Sequence[float]) -> str:
    return f"{interval(values)} (n = {len(values)})" if values else "-"


def _pooled(groups: Mapping[str, Sequence[float]]) -> str:
    if not groups:
        return "-"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*stratified_interval(groups)) + f" over {len(groups)} tasks"
