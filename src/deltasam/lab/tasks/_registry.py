"""The tasks by name: the eight GLUE tasks of the paper, sets of other domains, sentence embeddings, and so on.

WNLI and the diagnostic set AX of GLUE are excluded, as in the paper: on WNLI's development set the majority class
beats most models, and AX has no training set. The first metric is the paper's: Matthews correlation for CoLA, Pearson
correlation for STS-B, and accuracy for the others (MNLI: on the matched set; MRPC: accuracy, not F1).
"""

from __future__ import annotations

from typing import Any

from deltasam.lab.tasks._chat import CNN_DAILYMAIL_CHAT, ChatTask
from deltasam.lab.tasks._docstrings import DocstringTask
from deltasam.lab.tasks._hans import HansTask
from deltasam.lab.tasks._known import TASKS
from deltasam.lab.tasks._mirror import MirrorTask
from deltasam.lab.tasks._packages import PackagePromptTask
from deltasam.lab.tasks._prompts import DocstringPromptTask, PromptTask, as_prompts
from deltasam.lab.tasks._rated_sentences import RatedSentenceTask
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._sts import STS_SETS
from deltasam.lab.tasks._summarization import CNN_DAILYMAIL, Seq2SeqTask


def _glue(name: str, text: tuple[str, ...], metrics: tuple[str, ...], **options: Any) -> SentenceTask:
    return SentenceTask(name=name, dataset=name, hub=f"nyu-mll/glue:{name}", text=text, metrics=metrics, **options)


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")


#: The GLUE tasks. Labels are numbered as in ``glue`` on the hub.
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

#: The same tasks as prompts for causal language models: ``mnli-prompt``, ...
PROMPTS: dict[str, PromptTask] = {f"{name}-prompt": as_prompts(task) for name, task in GLUE.items()}

#: To evaluate models of STS-B on other sentences. The sets ``sts12`` to ``sts16`` would not do: STS-B's training set
#: has a sixth to a half of their pairs.
SICKR = SentenceTask(
    name="sickr", dataset="sickr", hub=STS_SETS["sickr"], text=_PAIR, label="score", kind="regression",
    metrics=("pearson", "spearman"), eval_split="test",
)  # fmt: skip

# The last five are for the user's data: set their files and columns.
TASKS.update(
    {
        "docstrings": DocstringTask(name="docstrings"),
        **GLUE,
        "hans-like": HansTask(name="hans-like"),
        "product-reviews": RatedSentenceTask(name="product-reviews", part="amazonReviewSnippets"),
        "tweets": RatedSentenceTask(name="tweets", part="tweets"),
        "sickr": SICKR,
        "mirror": MirrorTask(name="mirror"),
        "cnn_dailymail": CNN_DAILYMAIL,
        "docstrings-prompt": DocstringPromptTask(name="docstrings-prompt"),
        "packages-prompt": PackagePromptTask(name="packages-prompt"),
        **PROMPTS,
        "cnn_dailymail-chat": CNN_DAILYMAIL_CHAT,
        "classification": SentenceTask(name="classification"),
        "regression": SentenceTask(name="regression", kind="regression"),
        "seq2seq": Seq2SeqTask(name="seq2seq"),
        "classification-prompt": PromptTask(name="classification-prompt"),
        "chat": ChatTask(name="chat"),
    }
)
