"""Reads a folder of runs and makes statistics, the paper's tables and one page of HTML. Does not import torch."""

import deltasam.lab._extra  # noqa: F401
from deltasam.lab.report._compare import compare, comparison_notes
from deltasam.lab.report._formats import terminal_parts, to_csv, to_latex, to_markdown
from deltasam.lab.report._learned import largest_class, learning_problem, learning_problems
from deltasam.lab.report._measured import LANDSCAPE, read_measurement
from deltasam.lab.report._names import method_name, method_order, paper_model, short_models
from deltasam.lab.report._page import html_report
from deltasam.lab.report._risks import usual_risk
from deltasam.lab.report._runs import Run, Runs, read_runs, run_folders
from deltasam.lab.report._select import by_cell
from deltasam.lab.report._statistics import (
    Comparison,
    Summary,
    Wins,
    bootstrap_interval,
    count_wins,
    holm,
    paired_test,
    pooled_test,
    summarize,
)
from deltasam.lab.report._table import AGGREGATES, Cell, Column, Row, Table, table_notes
from deltasam.lab.report._table_results import (
    Results,
    result_tables,
    results_to_csv,
    results_to_latex,
    results_to_markdown,
    results_to_terminal,
)
from deltasam.lab.report._tables import (
    TABLE_TASKS,
    TABLES,
    glue_table,
    hyperparameter_table,
    risk_table,
    sts_table,
    summarization_table,
    time_table,
)

__all__ = [
    "AGGREGATES", "LANDSCAPE", "TABLES", "TABLE_TASKS", "Cell", "Column", "Comparison", "Results", "Row", "Run",
    "Runs", "Summary", "Table", "Wins", "bootstrap_interval", "by_cell", "compare", "comparison_notes", "count_wins",
    "glue_table", "holm", "html_report", "hyperparameter_table", "largest_class", "learning_problem",
    "learning_problems", "method_name", "method_order", "paired_test", "paper_model", "pooled_test",
    "read_measurement", "read_runs", "result_tables", "results_to_csv", "results_to_latex", "results_to_markdown",
    "results_to_terminal", "risk_table", "run_folders", "short_models", "sts_table", "summarization_table",
    "summarize", "table_notes", "terminal_parts", "time_table", "to_csv", "to_latex", "to_markdown", "usual_risk",
]  # fmt: skip
