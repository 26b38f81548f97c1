"""What the runs say, in a few sentences."""

from __future__ import annotations

from statistics import fmean

from deltasam.lab.report._compare import comparison_notes
from deltasam.lab.report._names import method_name, method_order
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import Key, select
from deltasam.step.names import counted


def summary_sentences(runs: Runs, cells: dict[Key, list[Run]]) -> list[str]:
    """How much there is, which method leads where, how sure that is, and what it costs."""
    if not cells:
        return ["There is no finished run here yet.", *runs.problems()]
    tasks = {run.task for found in cells.values() for run in found}
    models = {model for _, model, _ in cells}
    methods = sorted({method for _, _, method in cells}, key=method_order)
    first = f"{counted(len(runs.finished), 'finished run')} of {counted(len(methods), 'method')} "
    first += f"({', '.join(map(method_name, methods))}) on {counted(len(tasks), 'task')} "
    sentences = [f"{first}with {counted(len(models), 'model')}."]
    sentences += [leader for setup in sorted({key[:2] for key in cells}) if (leader := _leader(cells, *setup))]
    sentences += _comparisons(select(runs.finished, strict=False).cells)
    sentences += _costs(cells)
    return [*sentences, *runs.problems()]


def _leader(cells: dict[Key, list[Run]], task: str, model: str) -> str:
    found = {method: runs for (t, m, method), runs in cells.items() if (t, m) == (task, model)}
    if len(found) < 2:
        return ""
    means = {method: fmean(run.metrics[run.primary] for run in runs) for method, runs in found.items()}
    one = next(iter(found.values()))[0]
    top = (max if one.higher_is_better else min)(means.values())
    best = sorted((method for method, value in means.items() if value == top), key=method_order)
    seeds = sorted({len(runs) for runs in found.values()})
    over = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    if len(best) == len(found):
        return (
            f"On {task} with {model}, all {len(found)} methods have the same mean {one.primary}, {top:.4g} ({over})."
        )
    verb = "has" if len(best) == 1 else "share"
    return f"On {task} with {model}, {_and(best)} {verb} the best mean {one.primary}, {top:.4g} ({over})."


def _comparisons(cells: dict[Key, list[Run]]) -> list[str]:
    """Pooled over all that is in points; an error of prediction is in the unit of its task, and stands by itself."""
    less = {key: runs[0].primary for key, runs in cells.items() if not runs[0].higher_is_better}
    told = comparison_notes(_scores({key: runs for key, runs in cells.items() if key not in less}, 100))
    for task, metric in sorted({(key[0], metric) for key, metric in less.items()}):
        of_task = {key: runs for key, runs in cells.items() if key in less and key[0] == task}
        told += comparison_notes(_scores(of_task, -1), less_of=metric)
    return told


def _scores(cells: dict[Key, list[Run]], scale: float) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    scores: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for (task, model, method), runs in cells.items():
        scores.setdefault((model, method), {})[task] = {run.seed: scale * run.metrics[run.primary] for run in runs}
    return scores


def _costs(cells: dict[Key, list[Run]]) -> list[str]:
    """Time of an update relative to ERM, averaged over the setups that have both on the same device."""
    ratios: dict[str, list[float]] = {}
    for (task, model, method), runs in cells.items():
        plain = cells.get((task, model, "ERM"), [])
        if method != "ERM" and plain and {run.device for run in runs} == {run.device for run in plain}:
            slow, fast = (fmean(run.train_seconds / run.steps for run in both) for both in (runs, plain))
            ratios.setdefault(method, []).append(slow / fast)
    if not ratios:
        return []
    told = [f"{method_name(m)} {fmean(ratios[m]):.2f}" for m in sorted(ratios, key=method_order)]
    return [f"Time of an update relative to ERM: {', '.join(told)}."]


def _and(methods: list[str]) -> str:
    *first, last = map(method_name, methods)
    return f"{', '.join(first)} and {last}" if first else last
