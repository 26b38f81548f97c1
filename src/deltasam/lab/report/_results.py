"""The first sections of the page: the result of every method, what the runs do not show, and the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from deltasam.lab.report._compare import Test, comparison_tests
from deltasam.lab.report._conditions import MAIN
from deltasam.lab.report._fair import MIN_SEEDS, differences, verdict
from deltasam.lab.report._figures import look
from deltasam.lab.report._names import method_name
from deltasam.lab.report._runs import Run, broken_measurements
from deltasam.lab.report._section import Card, PageRuns, Section, View, setup_title
from deltasam.lab.report._select import RULE
from deltasam.lab.report._statistics import bootstrap_interval, holm, paired_test
from deltasam.lab.report._strips import axis_for, strip
from deltasam.step.names import pluralized

_PLAIN = "ERM"
_POINTS = "points"


class Unit(NamedTuple):
    """How a metric is written."""

    factor: float  #: The metric is multiplied by it.
    decimals: int  #: Digits after the point.
    suffix: str  #: After the name of the metric.

    def text(self, value: float, *, sign: bool = False) -> str:
        """Formats a value of the metric."""
        rounded = round(self.factor * value, self.decimals) + 0.0  # no negative zero
        return f"{rounded:{'+' if sign else ''}.{self.decimals}f}".replace("-", "−")


def unit_of(runs: Sequence[Run]) -> Unit:
    """Returns percent for scores between -1 and 1, and the metric's own unit otherwise."""
    largest = max(abs(run.score) for run in runs)
    if runs[0].higher_is_better and largest <= 1:
        return Unit(100, 2, ", %")
    return Unit(1, 4 if largest < 10 else 2, "")


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95% bootstrap interval of the mean, or None for fewer than three values."""
    return bootstrap_interval(values) if len(values) >= MIN_SEEDS else None


def warnings(runs: PageRuns) -> Section | None:
    """A box with the runs that did not learn, and the runs that are not on the page."""
    lines = []
    for (task, model), methods in runs.setups.items():
        for method, found in methods.items():
            whys = [runs.unlearned[run.run_id] for run in found if run.run_id in runs.unlearned]
            if whys:
                title, reasons = setup_title(task, model), "; ".join(dict.fromkeys(whys))
                lines.append(f"{method_name(method)} on {title}, {len(whys)} of {_seeds(len(found))}: {reasons}.")
    note = ""
    if lines:
        count = pluralized(len(runs.unlearned), "run")
        note = f"{count} did not learn. Try a larger learning rate, more epochs or a smaller radius."
    problems = [f"{problem}." for problem in runs.runs.problems()] + broken_measurements(runs.runs.finished)
    if not runs.cells:
        problems = ["There is no finished run here yet.", *problems]
    if not lines and not problems:
        return None
    return Section(
        name="warnings", title="Warnings", intro=note, lines=lines, problems=problems, template="warnings.html"
    )


def _seeds(count: int) -> str:
    return pluralized(count, "seed")


def results(runs: PageRuns) -> Section | None:
    """One dot plot per task and model: mean and interval of each method, and the difference to plain training."""
    cards = [_card(runs, *setup) for setup in runs.setups]
    intro = (
        "Marker: mean over the seeds. Small dots: single runs. Bar: 95% bootstrap interval of the mean, for three "
        "seeds or more. Dashed line: plain training (ERM). Differences are those to plain training, paired by seed; "
        "p is that of the exact permutation test."
    )
    return Section(name="results", title="Results", intro=intro, cards=cards, note=RULE) if cards else None


def _card(runs: PageRuns, task: str, model: str) -> Card:
    methods = runs.setups[task, model]
    every = [run for found in methods.values() for run in found]
    unit, differing = unit_of(every), differences(methods)
    tried = {method: len(runs.variants[task, model, method]) for method in methods}
    named = verdict(methods, tried)
    plain = {run.seed: run.score for run in methods.get(_PLAIN, [])}
    rows = []
    for method, found in methods.items():
        own = dict(found[0].conditions)
        fair = _PLAIN in methods and not differences({_PLAIN: methods[_PLAIN], method: found})
        pairs = [(run.score, plain[run.seed]) for run in found if run.seed in plain] if method != _PLAIN else []
        gaps = [ours - theirs for ours, theirs in pairs]
        settings = [f"{name} {value:g}" for name, value in found[0].settings if name not in ("lr", "seed")]
        settings = [one for one in settings if not one.startswith("rho")]
        radius = [f"radius {found[0].radius}"] if found[0].radius else []
        best = [f"best of {tried[method]} settings"] if tried[method] > 1 else []
        others = [f"{name} {own.get(name, 'none')}" for name in differing if name != "radius"]
        rows.append(
            {
                "method": method_name(method), "look": look(method), "best": method == named.best,
                "mean": unit.text(fmean(run.score for run in found)),
                "95% interval": _ends(interval_of([run.score for run in found]), unit),
                "difference": _gap(gaps, len(found), unit),
                "p": f"{paired_test(*zip(*pairs, strict=True)).p:.2g}" if fair and len(pairs) >= MIN_SEEDS else "–",
                "seeds": str(len(found)),
                "settings": ", ".join([*others, *radius, *settings, *best]),
                "values": {run.seed: run.score for run in found}, "gaps": gaps,
            }
        )  # fmt: skip
    first = every[0]
    better = "higher" if first.higher_is_better else "lower"
    common = {name: value for name, value in first.conditions if name not in differing}
    shared = ", ".join(f"{name} {common[name]}" for name in MAIN if name in common)
    about = [f"{first.primary}{unit.suffix}; {better} is better", _evaluated(first), f"Common settings: {shared}"]
    notes = [f"No best method is named: {'; '.join(named.reasons)}."] if named.reasons else []
    if named.best:
        notes = [
            f"★ Best mean: {method_name(named.best)}. Only the method differs. {_margin(methods, named.best, unit)}"
        ]
    if any(run.run_id in runs.unlearned for run in every):
        notes.append("Some of these runs did not learn; see the warnings.")
    return Card(
        title=setup_title(task, model),
        about=". ".join(about) + ".",
        head="mean",
        rows=rows,
        columns=["difference", "p", "95% interval", "seeds", "settings"],
        views=_views(rows, unit, bool(plain)) if len(every) > 1 else [],
        notes=notes,
    )


def _margin(methods: Mapping[str, Sequence[Run]], best: str, unit: Unit) -> str:
    """Describes the distance to the method with the next best mean, with its test."""
    sign = 1 if methods[best][0].higher_is_better else -1
    others = [method for method in methods if method != best]
    second = max(others, key=lambda method: sign * fmean(run.score for run in methods[method]))
    theirs = {run.seed: run.score for run in methods[second]}
    pairs = [(run.score, theirs[run.seed]) for run in methods[best] if run.seed in theirs]
    if len(pairs) < MIN_SEEDS:
        return f"It has too few seeds in common with the next, {method_name(second)}, for a test."
    test = paired_test(*zip(*pairs, strict=True))
    gap = unit.text(test.difference, sign=True)
    return f"Against the next, {method_name(second)}: {gap}, p = {test.p:.2g} ({pluralized(test.pairs, 'pair')})."


def _evaluated(run: Run) -> str:
    rows = f", {run.evaluation.rows:,} rows" if run.evaluation.rows else ""
    return f"Evaluated on {run.evaluation.split}{rows}"


def _gap(gaps: Sequence[float], seeds: int, unit: Unit) -> str:
    """The mean difference, with the number of pairs if some seeds have none."""
    if not gaps:
        return "–"
    pairs = "" if len(gaps) == seeds else f" ({pluralized(len(gaps), 'pair')})"
    return unit.text(fmean(gaps), sign=True) + pairs


def _ends(interval: tuple[float, float] | None, unit: Unit) -> str:
    return "–" if interval is None else " to ".join(map(unit.text, interval))


def _views(rows: Sequence[Mapping[str, Any]], unit: Unit, compared: bool) -> list[View]:
    """The scores, and the differences to plain training where there are any."""

    def tip(row: Mapping[str, Any]) -> str:
        seeds = [f"seed {seed}: {unit.text(value)}" for seed, value in row["values"].items()]
        more = [f"… {len(seeds) - 10} more"] if len(seeds) > 10 else []
        interval = f", 95% interval {row['95% interval']}" if row["95% interval"] != "–" else ""
        return "\n".join([f"{row['method']}: mean {row['mean']}{interval}", *seeds[:10], *more])

    def gap_tip(row: Mapping[str, Any]) -> str:
        ends = interval_of(row["gaps"])
        interval = f", 95% interval {' to '.join(unit.text(end, sign=True) for end in ends)}" if ends else ""
        return f"{row['method']} − ERM: {row['difference']}{interval}, {len(row['gaps'])} pairs, p = {row['p']}"

    plain = next((fmean(row["values"].values()) for row in rows if row["method"] == _PLAIN), None)
    scores = [list(row["values"].values()) for row in rows]
    found = [_view("score", rows, scores, unit, plain, tip)]
    gaps = [row["gaps"] for row in rows]
    if compared and any(gaps):
        found.append(_view("difference to plain training", rows, gaps, unit, 0.0, gap_tip))
    return found


def _view(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    values: Sequence[Sequence[float]],
    unit: Unit,
    reference: float | None,
    tip: Callable[[Mapping[str, Any]], str],
) -> View:
    intervals = [interval_of(one) for one in values]
    ends = [end for interval in intervals if interval for end in interval]
    shown = [value for one in values for value in one] + ends + ([] if reference is None else [reference])
    axis = axis_for(unit.factor * value for value in shown)
    strips = [
        strip(
            axis,
            row["look"],
            mean=unit.factor * fmean(one),
            tip=tip(row),
            dots=[unit.factor * value for value in one] if len(one) > 1 else [],
            interval=None if interval is None else (unit.factor * interval[0], unit.factor * interval[1]),
            reference=None if reference is None else unit.factor * reference,
        )
        if one
        else ""
        for row, one, interval in zip(rows, values, intervals, strict=True)
    ]
    return View(label=label, axis=axis, strips=strips)


def paired_tests(runs: PageRuns) -> Section | None:
    """A table of the pooled paired tests. Pairs in which more than the method differs are left out."""
    left: set[str] = set()

    def fair(model: str, task: str, first: str, second: str) -> bool:
        methods = runs.setups[task, model]
        differing = differences({first: methods[first], second: methods[second]})
        if differing:
            what = f"{method_name(first)} against {method_name(second)} on {setup_title(task, model)}"
            left.add(f"{what} ({', '.join(differing)})")
        return not differing

    made = [
        (test, unit)
        for unit, scores in _scores(runs).items()
        for test in comparison_tests(scores, fair=fair)
        if test.outcome.pairs >= MIN_SEEDS
    ]
    adjusted = holm([test.outcome.p for test, _ in made])  # for all units together
    rows = [_test_row(test._replace(adjusted=p), unit) for (test, unit), p in zip(made, adjusted, strict=True)]
    notes = ["A p below the smallest possible one needs more seeds. Holm: adjusted for all tests of the table."]
    if any(len(variants) > 1 for variants in runs.variants.values()):
        notes.append("Where the best of several settings was chosen by the same rows, p is too small.")
    if left:
        notes.append(f"Left out, since more than the method differs: {'; '.join(sorted(left))}.")
    intro = "Paired permutation tests, pooled over the tasks and models that both methods have."
    return Section(name="tests", title="Tests", intro=intro, rows=rows, note=" ".join(notes)) if rows else None


def _test_row(test: Test, unit: str) -> dict[str, str]:
    outcome = test.outcome
    difference = f"{outcome.difference:+.2f}" if unit == _POINTS else f"{-outcome.difference:+.3g}"
    return {
        "method": method_name(test.first),
        "difference": difference.replace("-", "−"),
        "unit": unit,
        "against": method_name(test.second),
        "p": f"{outcome.p:.3g}" + ("" if outcome.exact else " (drawn)"),
        "Holm p": f"{test.adjusted:.3g}",
        "smallest possible p": f"{outcome.smallest_p:.3g}",
        "better by mean in": str(test.wins),
        "pairs": str(outcome.pairs),
    }


def _scores(runs: PageRuns) -> dict[str, dict[tuple[str, str], dict[str, dict[int, float]]]]:
    """Unit to scores. Scores in points are pooled; errors, whose unit depends on the task, are not."""
    found: dict[str, dict[tuple[str, str], dict[str, dict[int, float]]]] = {}
    for (task, model), methods in runs.setups.items():
        for method, own in methods.items():
            points = own[0].higher_is_better
            unit = _POINTS if points else f"{own[0].primary} of {task} (less is better)"
            values = {run.seed: (100 if points else -1) * run.score for run in own}
            found.setdefault(unit, {}).setdefault((model, method), {})[task] = values
    return found
