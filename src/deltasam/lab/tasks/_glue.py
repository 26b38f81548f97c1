"""The eight GLUE tasks of the paper, with its metrics.

WNLI and the diagnostic set AX are excluded, as in the paper: on WNLI's development set the majority class beats most
models, and AX has no training set. The first metric is the paper's: Matthews correlation for CoLA, Pearson correlation
for STS-B, and accuracy for the others (MNLI: on the matched set; MRPC: accuracy, not F1).
"""

from __future__ import annotations

from typing import Any

from deltasam.lab.tasks._sentences import SentenceTask


def _glue(name: str, text: tuple[str, ...], metrics: tuple[str, ...], **options: Any) -> SentenceTask:
    return SentenceTask(name=name, dataset=name, hub=f"nyu-mll/glue:{name}", text=text, metrics=metrics, **options)


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")

#: The tasks by name. Labels are numbered as in ``glue`` on the hub.
GLUE: dict[str, SentenceTask] = {
    task.name: task
    for task in (
        _glue(
            "mnli", ("premise", "hypothesis"), ("accuracy",), classes=_NLI,
            eval_split="validation_matched",
        ),
        _glue(
            "qqp", ("question1", "question2"), ("accuracy", "f1"), classes=("not_duplicate", "duplicate"),
            stand_ins={"validation": ("trainheldout",)},  # training rows that a local subset holds out
        ),
        _glue("qnli", ("question", "sentence"), ("accuracy",), classes=("entailment", "not_entailment")),
        _glue("sst2", ("sentence",), ("accuracy",), classes=("negative", "positive")),
        _glue("mrpc", _PAIR, ("accuracy", "f1"), classes=("not_equivalent", "equivalent")),
        _glue("cola", ("sentence",), ("matthews", "accuracy"), classes=("unacceptable", "acceptable")),
        _glue("rte", _PAIR, ("accuracy",), classes=("entailment", "not_entailment")),
        _glue("stsb", _PAIR, ("pearson", "spearman"), kind="regression"),
    )
}  # fmt: skip
