"""The paper's figures, each with its table.

Keys: model as the paper calls it, method as :class:`~deltasam.lab.experiments.Result` names it, column of the table.
Scores are in percent, times in minutes. Figures that the paper omits (``-``) are absent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

GLUE_TASKS = ("mnli", "qqp", "rte", "qnli", "mrpc", "cola", "sst2", "stsb")
STS_SETS = {**{f"sts{year}": f"STS{year}" for year in range(12, 17)}, "stsb": "STS-B", "sickr": "SICK-R"}
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeLsum": "ROUGE-L"}
RUNS = 5  # per cell: a maximum over more runs than the paper has would be higher

Figures = dict[str, dict[str, dict[str, float]]]
"""Model -> method -> column -> value."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of the paper."""

    table: str  #: Its number, with what must be known to read it.
    aggregate: str  #: How the paper aggregates its runs: ``max``, ``mean``, ``median``, or its own description.
    figures: Figures  #: The figures.


def _figures(columns: Collection[str], text: str) -> Figures:
    """Reads lines of the form ``model | method | figures``, with the figures in the order of the columns."""
    found: Figures = {}
    for line in text.strip().splitlines():
        model, method, figures = (part.strip() for part in line.split("|"))
        row = zip(columns, figures.split(), strict=True)
        found.setdefault(model, {})[method] = {column: float(figure) for column, figure in row if figure != "-"}
    return found


# SMART's results on RTE, MRPC and STS-B start from a model trained on MNLI; the paper calls them not comparable.
_GLUE = """
BERT-base     | ERM       | 82.9 83.8 91.0 68.2 90.8 85.3 62.3 92.4 89.3
BERT-base     | ERM+RDrop | 84.1 85.5 91.4 71.1 92.0 87.3 62.6 93.0 89.6
BERT-base     | SAM       | 83.9 85.0 91.6 69.3 91.7 88.2 63.1 93.0 89.4
BERT-base     | DeltaSAM  | 84.7 85.2 91.7 72.2 91.5 89.5 63.8 93.7 89.7
RoBERTa-large | ERM       | 88.9 90.2 92.2 86.6 94.7 90.9 68.0 96.4 92.4
RoBERTa-large | ERM+RDrop | 89.7 90.9 92.5 88.4 95.2 91.4 70.0 96.9 92.5
RoBERTa-large | FreeLB    | 89.8 90.6 92.6 88.1 95.0 91.4 71.1 96.7 92.7
RoBERTa-large | ERM+SMART | -    91.1 92.4 -    95.6 -    70.6 96.9 -
RoBERTa-large | ERM+R3F   | -    91.1 92.4 88.5 95.3 91.6 71.2 97.0 -
RoBERTa-large | SAM       | 89.6 91.0 92.3 88.5 95.0 91.4 69.2 96.7 92.4
RoBERTa-large | DeltaSAM  | 90.1 91.1 92.5 89.2 95.1 92.2 71.1 96.9 92.7
"""
GLUE = Source(table="Table 1 (development set)", aggregate="max", figures=_figures(("avg", *GLUE_TASKS), _GLUE))

# R3F on this task is noise on the input embeddings and nothing else (a footnote of the paper).
_STS = """
Mirror-BERT-base    | ERM                     | 74.85 67.87 80.98 71.84 81.58 74.41 77.78 69.53
Mirror-BERT-base    | FreeLB                  | 75.71 69.78 80.81 72.87 82.55 74.77 79.01 70.40
Mirror-BERT-base    | ERM+EmbeddingNoise      | 75.27 68.58 80.93 72.51 81.97 75.47 77.62 69.79
Mirror-BERT-base    | SAM                     | 75.50 68.37 82.16 72.88 82.22 74.71 77.98 70.20
Mirror-BERT-base    | DeltaSAM                | 75.72 68.44 82.30 73.12 82.27 75.12 78.83 69.94
Mirror-BERT-base    | SAM+EmbeddingNoise      | 76.44 70.09 83.53 74.22 82.67 77.61 80.16 66.81
Mirror-BERT-base    | DeltaSAM+EmbeddingNoise | 76.71 69.73 83.73 74.58 83.01 77.72 79.08 69.11
Mirror-RoBERTa-base | ERM                     | 74.98 64.49 81.69 73.32 79.78 77.49 78.53 69.56
Mirror-RoBERTa-base | FreeLB                  | 75.73 65.52 82.41 74.00 80.72 78.60 79.06 69.81
Mirror-RoBERTa-base | ERM+EmbeddingNoise      | 75.32 64.58 82.12 73.62 80.27 77.90 78.66 70.13
Mirror-RoBERTa-base | SAM                     | 75.18 64.86 81.96 73.56 79.82 77.06 78.83 70.21
Mirror-RoBERTa-base | DeltaSAM                | 75.27 64.97 81.89 73.46 80.12 77.62 78.96 69.89
Mirror-RoBERTa-base | SAM+EmbeddingNoise      | 75.90 66.65 82.52 74.10 80.81 78.47 79.02 69.71
Mirror-RoBERTa-base | DeltaSAM+EmbeddingNoise | 76.31 66.94 82.86 74.46 81.13 78.91 79.52 70.32
"""
STS = Source(table="Table 2 (Spearman, test sets)", aggregate="mean", figures=_figures(("avg", *STS_SETS), _STS))

_SUMMARIZATION = """
BART-large | ERM       | 44.16 21.28 40.90
BART-large | ERM+R3F   | 44.38 21.53 41.17
BART-large | ERM+RDrop | 44.51 21.58 41.24
BART-large | DeltaSAM  | 44.70 21.54 41.81
PEGASUS    | ERM       | 44.17 21.41 41.11
"""
# The paper reports one run.
SUMMARIZATION = Source(table="Table 3 (CNN/DailyMail)", aggregate="mean", figures=_figures(ROUGE, _SUMMARIZATION))

_RISK_COLUMNS = ("mrpc risk", "rte risk", "mrpc median", "mrpc max", "rte median", "rte max")
_RISK = """
BERT-base | ERM            | 1.93 2.97 84.6 85.3 67.9 68.2
BERT-base | SAM            | 0.62 0.78 86.8 88.2 68.6 69.3
BERT-base | DeltaSAM       | 0.59 0.75 87.5 89.5 69.3 72.2
BERT-base | PerInstanceSAM | 0.50 0.65 88.2 89.7 70.0 71.5
"""
ADVERSARIAL_RISK = Source(
    table="Table 4 (rho = 0.05)",
    aggregate="mean risk, median and max accuracy",
    figures=_figures(_RISK_COLUMNS, _RISK),
)

# The paper gives one rho for SAM and delta-SAM.
_HYPERPARAMETERS = """
BERT-base     | SAM rho      | 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.01
BERT-base     | DeltaSAM rho | 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.01
BERT-base     | DeltaSAM eta | 1e-4 1e-4 5e-4 1e-4 1e-4 1e-4 1e-4 1e-4
RoBERTa-large | SAM rho      | 0.02 0.02 0.02 0.02 0.02 0.02 0.02 0.01
RoBERTa-large | DeltaSAM rho | 0.02 0.02 0.02 0.02 0.02 0.02 0.02 0.01
RoBERTa-large | DeltaSAM eta | 1e-4 1e-4 5e-4 1e-4 1e-4 1e-4 1e-4 1e-4
"""
HYPERPARAMETERS = Source(
    table="Table 5 (appendix)",
    aggregate="chosen on the development set",
    figures=_figures(GLUE_TASKS, _HYPERPARAMETERS),
)

_RUNNING_TIME = """
BERT-base     | SAM            | 1240 818  15 349  12  25 118 26
BERT-base     | DeltaSAM       | 1350 995  16 450  15  25 132 31
BERT-base     | PerInstanceSAM | -    -    87 -    105 -  -   -
RoBERTa-large | SAM            | 1056 2591 33 1402 30  38 285 42
RoBERTa-large | DeltaSAM       | 1699 2963 36 1425 35  45 325 58
"""
RUNNING_TIME = Source(
    table="Table 6 (appendix; minutes on one RTX 2080)", aggregate="mean", figures=_figures(GLUE_TASKS, _RUNNING_TIME)
)
