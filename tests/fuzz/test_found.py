"""What ``make fuzz`` has found, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from deltasam.lab.experiments import ConfigError, RunConfig


@pytest.mark.parametrize("value", [1, 2.5, True, {"RDrop"}])
def test_regularisers_that_are_no_list(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"regularisers=.*: must be a name, a mapping with `name`, or a list of them"
    ):
        RunConfig.from_plain({"task": "mrpc", "model": "bert-base-cased", "regularisers": value})
