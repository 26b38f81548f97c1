"""From a folder of runs to statistics, the paper's tables and one page of HTML. Imports numpy, never torch."""

from deltasam.report._summary import Summary, bootstrap_interval, summarize
from deltasam.report._tests import Comparison, holm, paired_test, pooled_test
from deltasam.report._wins import Wins, count_wins

__all__ = [
    "Comparison",
    "Summary",
    "Wins",
    "bootstrap_interval",
    "count_wins",
    "holm",
    "paired_test",
    "pooled_test",
    "summarize",
]
