"""What is private to torch and not there any more is told by name, with the version."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from deltasam.parallel.distributed import _parameter_groups


@pytest.mark.parametrize(
    "module",
    [
        SimpleNamespace(),
        SimpleNamespace(_get_fsdp_state=SimpleNamespace),
        SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace()])),
    ],
    ids=["no state", "no groups", "other groups"],
)
def test_other_versions_of_torch(module: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=rf"torch {re.escape(torch.__version__)} keeps.*scope='global'"):
        _parameter_groups(module)
