"""From a folder of runs to statistics, the paper's tables and one page of HTML. Imports numpy, never torch."""

from collections.abc import Callable

from deltasam.lab.report._compare import compare, comparison_notes
from deltasam.lab.report._formats import from_csv, table_notes, to_csv, to_latex, to_markdown, to_terminal
from deltasam.lab.report._measured import read_landscape
from deltasam.lab.report._names import method_name, method_order, paper_model, short_models
from deltasam.lab.report._other_tables import hyperparameter_table, risk_table, time_table
from deltasam.lab.report._page import html_report
from deltasam.lab.report._risks import usual_risk
from deltasam.lab.report._runs import Run, Runs, read_runs, run_folders
from deltasam.lab.report._scores import glue_table, sts_table, summarization_table
from deltasam.lab.report._select import by_cell
from deltasam.lab.report._summary import Summary, bootstrap_interval, summarize
from deltasam.lab.report._table import AGGREGATES, Cell, Column, Row, Table
from deltasam.lab.report._tests import Comparison, holm, paired_test, pooled_test
from deltasam.lab.report._wins import Wins, count_wins

TABLES: dict[str, Callable[..., Table]] = {
    "glue": glue_table,
    "sts": sts_table,
    "summarization": summarization_table,
    "adversarial-risk": risk_table,
    "hyperparameters": hyperparameter_table,
    "running-time": time_table,
}
"""The tables of the paper by name."""

__all__ = [
    "AGGREGATES",
    "TABLES",
    "Cell",
    "Column",
    "Comparison",
    "Row",
    "Run",
    "Runs",
    "Summary",
    "Table",
    "Wins",
    "bootstrap_interval",
    "by_cell",
    "compare",
    "comparison_notes",
    "count_wins",
    "from_csv",
    "glue_table",
    "holm",
    "html_report",
    "hyperparameter_table",
    "method_name",
    "method_order",
    "paired_test",
    "paper_model",
    "pooled_test",
    "read_landscape",
    "read_runs",
    "risk_table",
    "run_folders",
    "short_models",
    "sts_table",
    "summarization_table",
    "summarize",
    "table_notes",
    "time_table",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_terminal",
    "usual_risk",
]
