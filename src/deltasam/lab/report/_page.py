"""The report: one page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from deltasam.lab.report import _plots as plots
from deltasam.lab.report._colors import look
from deltasam.lab.report._html_tables import examples_table, paper_table, results_table, runs_table
from deltasam.lab.report._measured import broken
from deltasam.lab.report._names import method_name, method_order, short_models
from deltasam.lab.report._risks import chosen_risks
from deltasam.lab.report._runs import Run, Runs
from deltasam.lab.report._select import RULE, Key, by_cell
from deltasam.lab.report._svg import mark
from deltasam.lab.report._table import Table
from deltasam.lab.report._words import summary_sentences

# Nothing but what stands in the page may be used, whatever a name or a text in the runs tries to bring in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_report(runs: Runs, tables: Sequence[Table], *, title: str = "Runs") -> str:
    """The page.

    Args:
        runs: The runs.
        tables: The paper's tables; those without any of our runs are left out.
        title: Its heading.

    Returns:
        HTML with its styles, scripts and plots inside; all names and texts of the runs are escaped.
    """
    cells = _shown(by_cell(runs.finished))
    risks = chosen_risks(cells)
    logs = {run.run_id: run.log() for found in cells.values() for run in found}
    with_runs = [table for table in tables if any(cell.values for row in table.rows for cell in row.cells.values())]
    sections = [
        ("summary", "Summary", _list([*summary_sentences(runs, cells), *broken(runs.finished)])),
        ("results", "Results", results_table(cells, risks.values) + f'<p class="soft">{escape(RULE)}</p>'),
        ("curves", "Learning curves", _figures([
            *plots.curves(cells, logs, None, what="Evaluation", unit=""),
            *plots.curves(cells, logs, "loss", what="Training loss", unit="loss"),
        ])),
        ("risk", "Accuracy against adversarial risk",
         _figures(plots.risk_scatter(cells, risks.values)) + (_list(risks.notes) if risks.values else "")),
        ("sharpness", "Sharpness during training", _figures(
            plots.curves(cells, logs, "sharpness", what="Sharpness", unit="rise of the loss when perturbed")
        )),
        ("weights", "Instance weights", _figures([
            *plots.curves(cells, logs, "weights_mean", what="Mean weight g", unit="mean of g in a batch"),
            *plots.curves(cells, logs, "weights_std", what="Spread of the weights", unit="standard deviation of g"),
            *plots.curves(cells, logs, "weights_max", what="Largest weight", unit="largest g in a batch"),
            *plots.weight_histograms(cells),
        ]) + examples_table(cells)),
        ("landscape", "Loss landscape", _figures(plots.landscapes(cells))),
        ("cost", "Cost", _figures(plots.cost_bars(cells))),
        *((table.name, f"The paper's table: {table.name}", paper_table(table)) for table in with_runs),
        ("runs", "All runs", runs_table(runs.finished)),
    ]  # fmt: skip
    shown = [section for section in sections if section[2]]
    body = [
        f"<h1>{escape(title)}</h1>",
        "<nav>" + "".join(f'<a href="#{name}">{escape(head)}</a>' for name, head, _ in shown) + "</nav>",
        _legend({method for _, _, method in cells}),
        *(f'<section id="{name}"><h2>{escape(head)}</h2>{inside}</section>' for name, head, inside in shown),
    ]
    assets = files("deltasam.lab.report") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + f"\n</main><script>{script}</script></body></html>\n"
    )


def _shown(cells: dict[Key, list[Run]]) -> dict[Key, list[Run]]:
    """The cells with the models' names as they are shown: short, and still different."""
    short = short_models(model for _, model, _ in cells)
    return {(task, short[model], method): found for (task, model, method), found in cells.items()}


def _figures(found: Iterable[plots.Plot] | Iterator[plots.Plot]) -> str:
    drawn = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in found]
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _legend(methods: set[str]) -> str:
    entries = []
    for method in sorted(methods, key=method_order):
        style = look(method)
        dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
        line = f'<line x1="0" x2="34" y1="6" y2="6" stroke="{style.color}" stroke-width="2"{dash}/>'
        name = escape(method_name(method))
        sign = f'<svg viewBox="0 0 34 12" aria-hidden="true">{line}{mark(style, 17, 6, method_name(method))}</svg>'
        entries.append(f"<li>{sign}{name}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'
