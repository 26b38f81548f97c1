"""The sections of the page, in their order. A new section is a function in a file here and an entry in the list."""

from collections.abc import Callable

from deltasam.lab.report._sections._base import PageRuns, Section
from deltasam.lab.report._sections._cost import cost
from deltasam.lab.report._sections._curves import learning_curves, sharpness
from deltasam.lab.report._sections._landscape import landscape
from deltasam.lab.report._sections._results import results
from deltasam.lab.report._sections._risk import risk
from deltasam.lab.report._sections._summary import summary
from deltasam.lab.report._sections._weights import weights

SECTIONS: tuple[Callable[[PageRuns], Section | None], ...] = (
    summary, results, learning_curves, risk, sharpness, weights, landscape, cost,
)  # fmt: skip
"""Each makes a section, or None if the runs have nothing to show. The paper's tables and the list of runs follow."""
