"""The figures of the paper, typed in once, each with the table it stands in.

Keys: model as the paper calls it, method as :class:`~deltasam.lab.experiments.Result` names it, column of the table.
Scores are in percent, times in minutes. What the paper leaves out (``-``) is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

GLUE_TASKS = ("mnli", "qqp", "rte", "qnli", "mrpc", "cola", "sst2", "stsb")
STS_SETS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")
ROUGE = ("rouge1", "rouge2", "rougeLsum")
RUNS = 5  # of each cell: a `max` of the paper is the best of so many, and that of more would be higher

Figures = dict[str, dict[str, dict[str, float]]]
"""Model -> method -> column -> value."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table of the paper.

    Attributes:
        table: Its number in the paper, or its label.
        aggregate: How the paper sums up its runs: ``max``, ``mean``, ``median``, or what it says itself.
        figures: The figures.
    """

    table: str
    aggregate: str
    figures: Figures


def _rows(columns: tuple[str, ...], **methods: str) -> dict[str, dict[str, float]]:
    """Methods with their figures in the order of the columns; ``-`` where the paper has none."""
    return {
        method.replace("_", "+"): {
            column: float(text) for column, text in zip(columns, figures.split(), strict=True) if text != "-"
        }
        for method, figures in methods.items()
    }


_AVERAGE = ("avg",)

# SMART's results on RTE, MRPC and STS-B come from a model trained on MNLI before; the paper calls them not comparable.
GLUE = Source(
    table="Table 1 (development set)",
    aggregate="max",
    figures={
        "BERT-base": _rows(
            (*_AVERAGE, *GLUE_TASKS),
            ERM="82.9 83.8 91.0 68.2 90.8 85.3 62.3 92.4 89.3",
            ERM_RDrop="84.1 85.5 91.4 71.1 92.0 87.3 62.6 93.0 89.6",
            SAM="83.9 85.0 91.6 69.3 91.7 88.2 63.1 93.0 89.4",
            DeltaSAM="84.7 85.2 91.7 72.2 91.5 89.5 63.8 93.7 89.7",
        ),
        "RoBERTa-large": _rows(
            (*_AVERAGE, *GLUE_TASKS),
            ERM="88.9 90.2 92.2 86.6 94.7 90.9 68.0 96.4 92.4",
            ERM_RDrop="89.7 90.9 92.5 88.4 95.2 91.4 70.0 96.9 92.5",
            FreeLB="89.8 90.6 92.6 88.1 95.0 91.4 71.1 96.7 92.7",
            ERM_SMART="- 91.1 92.4 - 95.6 - 70.6 96.9 -",
            ERM_R3F="- 91.1 92.4 88.5 95.3 91.6 71.2 97.0 -",
            SAM="89.6 91.0 92.3 88.5 95.0 91.4 69.2 96.7 92.4",
            DeltaSAM="90.1 91.1 92.5 89.2 95.1 92.2 71.1 96.9 92.7",
        ),
    },
)

# On this task R3F is noise on the input embeddings and nothing else (a footnote of the paper).
STS = Source(
    table="Table 2 (Spearman, test sets)",
    aggregate="mean",
    figures={
        "Mirror-BERT-base": _rows(
            (*_AVERAGE, *STS_SETS),
            ERM="74.85 67.87 80.98 71.84 81.58 74.41 77.78 69.53",
            FreeLB="75.71 69.78 80.81 72.87 82.55 74.77 79.01 70.40",
            ERM_EmbeddingNoise="75.27 68.58 80.93 72.51 81.97 75.47 77.62 69.79",
            SAM="75.50 68.37 82.16 72.88 82.22 74.71 77.98 70.20",
            DeltaSAM="75.72 68.44 82.30 73.12 82.27 75.12 78.83 69.94",
            SAM_EmbeddingNoise="76.44 70.09 83.53 74.22 82.67 77.61 80.16 66.81",
            DeltaSAM_EmbeddingNoise="76.71 69.73 83.73 74.58 83.01 77.72 79.08 69.11",
        ),
        "Mirror-RoBERTa-base": _rows(
            (*_AVERAGE, *STS_SETS),
            ERM="74.98 64.49 81.69 73.32 79.78 77.49 78.53 69.56",
            FreeLB="75.73 65.52 82.41 74.00 80.72 78.60 79.06 69.81",
            ERM_EmbeddingNoise="75.32 64.58 82.12 73.62 80.27 77.90 78.66 70.13",
            SAM="75.18 64.86 81.96 73.56 79.82 77.06 78.83 70.21",
            DeltaSAM="75.27 64.97 81.89 73.46 80.12 77.62 78.96 69.89",
            SAM_EmbeddingNoise="75.90 66.65 82.52 74.10 80.81 78.47 79.02 69.71",
            DeltaSAM_EmbeddingNoise="76.31 66.94 82.86 74.46 81.13 78.91 79.52 70.32",
        ),
    },
)

SUMMARIZATION = Source(
    table="Table 3 (CNN/DailyMail)",
    aggregate="mean",  # of one run, as far as the paper says
    figures={
        "BART-large": _rows(
            ROUGE,
            ERM="44.16 21.28 40.90",
            ERM_R3F="44.38 21.53 41.17",
            ERM_RDrop="44.51 21.58 41.24",
            DeltaSAM="44.70 21.54 41.81",
        ),
        "PEGASUS": _rows(ROUGE, ERM="44.17 21.41 41.11"),
    },
)

_RISK_COLUMNS = ("mrpc risk", "rte risk", "mrpc median", "mrpc max", "rte median", "rte max")
ADVERSARIAL_RISK = Source(
    table="Table 4 (rho = 0.05)",
    aggregate="mean risk, median and max accuracy",
    figures={
        "BERT-base": _rows(
            _RISK_COLUMNS,
            ERM="1.93 2.97 84.6 85.3 67.9 68.2",
            SAM="0.62 0.78 86.8 88.2 68.6 69.3",
            DeltaSAM="0.59 0.75 87.5 89.5 69.3 72.2",
            PerInstanceSAM="0.50 0.65 88.2 89.7 70.0 71.5",
        )
    },
)

# One rho serves SAM and delta-SAM, as far as the paper says.
HYPERPARAMETERS = Source(
    table="Table 5 (appendix)",
    aggregate="chosen on the development set",
    figures={
        model: _rows(
            GLUE_TASKS,
            **{
                "SAM rho": " ".join([rho] * 7 + ["0.01"]),
                "DeltaSAM rho": " ".join([rho] * 7 + ["0.01"]),
                "DeltaSAM eta": "1e-4 1e-4 5e-4 1e-4 1e-4 1e-4 1e-4 1e-4",
            },
        )
        for model, rho in (("BERT-base", "0.05"), ("RoBERTa-large", "0.02"))
    },
)

RUNNING_TIME = Source(
    table="Table 6 (appendix; minutes on one RTX 2080)",
    aggregate="mean",
    figures={
        "BERT-base": _rows(
            GLUE_TASKS,
            SAM="1240 818 15 349 12 25 118 26",
            DeltaSAM="1350 995 16 450 15 25 132 31",
            PerInstanceSAM="- - 87 - 105 - - -",
        ),
        "RoBERTa-large": _rows(
            GLUE_TASKS,
            SAM="1056 2591 33 1402 30 38 285 42",
            DeltaSAM="1699 2963 36 1425 35 45 325 58",
        ),
    },
)
