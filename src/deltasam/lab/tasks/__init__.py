"""Tasks: data, encoding, objective and metrics of an experiment.

A task is a frozen dataclass and its own configuration, like a method. ``TASKS`` contains all tasks by name. The data
comes from the hub, a local folder, or Python itself; the tasks ``classification``, ``regression`` and ``seq2seq``
take files and columns of the user. Causal language models learn the same tasks as prompts (``mnli-prompt``), and
conversations (``chat``).

    >>> from deltasam.lab.tasks import DataSource, find_task
    >>> data = find_task("docstrings").load(DataSource())
    >>> sorted(data.splits), data.classes
    (['train', 'validation'], ('mismatch', 'match'))
"""

from deltasam.lab.tasks._base import Task
from deltasam.lab.tasks._chat import ChatTask
from deltasam.lab.tasks._data import Data, DataError
from deltasam.lab.tasks._docstrings import DocstringTask
from deltasam.lab.tasks._encoding import tokenizing_once
from deltasam.lab.tasks._hans import HansTask
from deltasam.lab.tasks._known import TASKS, find_task
from deltasam.lab.tasks._language import LanguageTask
from deltasam.lab.tasks._measured import Measured
from deltasam.lab.tasks._metrics import METRICS, rouge
from deltasam.lab.tasks._mirror import MirrorTask
from deltasam.lab.tasks._models import dropout_options, find_model, load_model, load_tokenizer
from deltasam.lab.tasks._packages import PackagePromptTask
from deltasam.lab.tasks._prompts import DocstringPromptTask, PromptTask
from deltasam.lab.tasks._rated_sentences import RatedSentenceTask
from deltasam.lab.tasks._registry import GLUE, PROMPTS
from deltasam.lab.tasks._sentences import SentenceTask
from deltasam.lab.tasks._siamese import CosineClassifier
from deltasam.lab.tasks._source import DataSource
from deltasam.lab.tasks._sts import STS_SETS, read_sts, sts_scores
from deltasam.lab.tasks._summarization import Seq2SeqTask, by_sentence

__all__ = [
    "GLUE",
    "METRICS",
    "PROMPTS",
    "STS_SETS",
    "TASKS",
    "ChatTask",
    "CosineClassifier",
    "Data",
    "DataError",
    "DataSource",
    "DocstringPromptTask",
    "DocstringTask",
    "HansTask",
    "LanguageTask",
    "Measured",
    "MirrorTask",
    "PackagePromptTask",
    "PromptTask",
    "RatedSentenceTask",
    "SentenceTask",
    "Seq2SeqTask",
    "Task",
    "by_sentence",
    "dropout_options",
    "find_model",
    "find_task",
    "load_model",
    "load_tokenizer",
    "read_sts",
    "rouge",
    "sts_scores",
    "tokenizing_once",
]
