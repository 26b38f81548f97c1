"""The selections of GLUE runs that several tables share."""

from __future__ import annotations

import dataclasses

from deltasam.lab.pages.runs import Selection

SMALL = Selection(("glue", "glue-weightings", "adversarial-risk"))  # plain training there is the same run
ETA = Selection(("glue-eta",), method_suffix=", both chosen")
LARGER = Selection(("glue-larger",), fixed=True)
LARGER_TUNED = Selection(("glue-larger",), tuned_only=True)
SECOND = Selection(("minilm",), fixed=True)
SECOND_TUNED = Selection(("minilm",), tuned_only=True)
SECOND_LARGER = Selection(("minilm-larger",), fixed=True)
GLUE = {
    "glue": SMALL, "larger": LARGER, "larger-tuned": LARGER_TUNED,
    "second": SECOND, "second-tuned": SECOND_TUNED, "second-larger": SECOND_LARGER,
}  # fmt: skip
FIRST_ALL = (SMALL, LARGER)
SECOND_ALL = tuple(dataclasses.replace(each, task_suffix=", second encoder") for each in (SECOND, SECOND_LARGER))
