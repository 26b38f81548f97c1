"""Methods by name."""

from __future__ import annotations

import pytest

from deltasam import methods
from deltasam.lab.catalogue import METHODS, find_method


def test_every_exported_method_is_listed_and_can_be_made_without_arguments() -> None:
    exported = {name for name in methods.__all__ if name not in ("Method", "Step")}
    assert set(METHODS) <= exported
    assert list(METHODS)[:3] == ["ERM", "SAM", "DeltaSAM"]
    for name, kind in METHODS.items():
        assert type(kind()).__name__ == name
        assert "/" in kind.cost or "+" in kind.cost


@pytest.mark.parametrize("name", ["DeltaSAM", "delta-sam", "delta_sam", "deltasam", "DELTASAM"])
def test_every_spelling_is_found(name: str) -> None:
    assert find_method(name) is methods.DeltaSAM


def test_unknown_names_get_the_nearest_or_all() -> None:
    with pytest.raises(ValueError, match="'delta-smm' is not a method; did you mean DeltaSAM"):
        find_method("delta-smm")
    with pytest.raises(ValueError, match="there are ERM, SAM, DeltaSAM"):
        find_method("xyzzy")
