"""The tables of the report in HTML; every name in them is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

from deltasam.lab.report._lines import heading, lines, usual_note
from deltasam.lab.report._measured import WEIGHTS, weights_in
from deltasam.lab.report._names import method_name, method_order, short_models
from deltasam.lab.report._runs import Run
from deltasam.lab.report._select import Key
from deltasam.lab.report._summary import summarize
from deltasam.lab.report._table import MISSING, Table

_MOST_ROWS = 2000


def results_table(cells: dict[Key, list[Run]], risk_of: Mapping[str, float]) -> str:
    """One row per task, model and method, with all statistics; ``risk_of``: the adversarial risk by the run's id."""
    heads = (
        "task", "model", "method", "metric", "runs", "mean", "std", "95% CI of the mean", "median", "max",
        "adversarial risk", "ms per update", "forward/backward", "peak MiB",
    )  # fmt: skip
    rows = []
    for (task, model, method), runs in sorted(
        cells.items(), key=lambda item: (*item[0][:2], method_order(item[0][2]))
    ):
        found = summarize([run.metrics[run.primary] for run in runs])
        risks = [risk_of[run.run_id] for run in runs if run.run_id in risk_of]
        rows.append(
            [
                _text(task), _text(model), _text(method_name(method)), _text(runs[0].primary), _number(found.n, "d"),
                _number(found.mean, ".4f"), _number(found.std, ".4f"),
                f'<td data-value="{found.low!r}">{found.low:.4f} to {found.high:.4f}</td>',
                _number(found.median, ".4f"), _number(found.max, ".4f"),
                _number(fmean(risks), ".3f") if risks else '<td data-value="" class="missing">not measured</td>',
                _number(fmean(1000 * run.train_seconds / run.steps for run in runs), ".1f"),
                _passes(runs),
                _number(fmean(run.memory / 2**20 for run in runs), ".0f"),
            ]
        )  # fmt: skip
    return _table(heads, rows, sorts=True)


def runs_table(runs: Sequence[Run]) -> str:
    """One row per run; beyond 2,000 the rest is told of."""
    heads = ("run", "task", "model", "method", "seed", "metric", "value", "best", "updates", "seconds", "settings")
    short = short_models(run.model for run in runs)
    rows = [
        [
            _text(run.path.name), _text(run.task), _text(short[run.model]), _text(method_name(run.method)),
            _number(run.seed, "d"), _text(run.primary), _number(run.metrics[run.primary], ".4f"),
            _number(run.best, ".4f"), _number(run.steps, "d"), _number(run.train_seconds, ".1f"),
            _text(", ".join(f"{name}={value:g}" for name, value in run.settings)),
        ]
        for run in runs[:_MOST_ROWS]
    ]  # fmt: skip
    rest = len(runs) - _MOST_ROWS
    more = f'<p class="soft">and {rest} more; `deltasam table` reads them all</p>' if rest > 0 else ""
    return _table(heads, rows, sorts=True) + more if rows else ""


def examples_table(cells: dict[Key, list[Run]]) -> str:
    """The instances with the largest and the smallest weights, with their texts."""
    heads = ("text", "g", "rank", "task", "method", "seed")
    rows = [
        [
            f'<td class="example">{escape(str(example["text"]))}</td>', _number(float(example["weight"]), ".4g"),
            _number(int(example["rank"]), "d"), _text(run.task), _text(method_name(run.method)),
            _number(run.seed, "d"),
        ]
        for runs in cells.values()
        for run in runs
        for example in (weights_in(run.analysis(WEIGHTS)) or {}).get("examples", ())
    ]  # fmt: skip
    return _table(heads, rows, sorts=True) if rows else ""


def paper_table(table: Table) -> str:
    """A table beside the paper's."""
    heads = ("method", *(column.header for column in table.columns))
    rows = []
    for line in lines(table):
        if line.kind == "group":
            rows.append([f'<td colspan="{len(heads)}">{escape(line.label)}</td>'])
            continue
        best = line.best or (False,) * len(line.cells)
        cells = [_paper_cell(text, best=b) for text, b in zip(line.cells, best, strict=True)]
        rows.append([f"<td>{escape(line.label)}</td>", *cells])
    kinds = [line.kind for line in lines(table)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in (usual_note(table), *table.notes))
    return f'<p>{escape(heading(table))}</p>{_table(heads, rows, kinds=kinds)}<ul class="soft">{notes}</ul>'


def _paper_cell(text: str, *, best: bool) -> str:
    kind = ' class="best"' if best else ' class="missing"' if text == MISSING else ""
    return f"<td{kind}>{escape(text)}</td>"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, sorts: bool = False, kinds: Sequence[str] = ()
) -> str:
    texts = [cell.startswith('<td class="text"') for cell in rows[0]] if sorts and rows else [False] * len(heads)
    classes = [' class="text"' if text else "" for text in texts]
    head = "".join(f'<th scope="col"{kind}>{escape(text)}</th>' for kind, text in zip(classes, heads, strict=True))
    marks = [f' class="{kind}"' for kind in kinds] or [""] * len(rows)
    body = "".join(f"<tr{kind}>{''.join(cells)}</tr>" for kind, cells in zip(marks, rows, strict=True))
    name = ' class="sorts"' if sorts else ""
    return f'<div class="scroll"><table{name}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _passes(runs: Sequence[Run]) -> str:
    forwards, backwards = fmean(run.forwards for run in runs), fmean(run.backwards for run in runs)
    return f'<td data-value="{forwards + backwards!r}">{forwards:.0f}/{backwards:.0f}</td>'


def _text(text: str) -> str:
    return f'<td class="text" title="{escape(text)}">{escape(text)}</td>'


def _number(value: float, form: str) -> str:
    if value != value:
        return '<td data-value="" class="missing">–</td>'
    return f'<td data-value="{value!r}">{value:{form}}</td>'
