"""Methods by name."""

from __future__ import annotations

import pytest

from deltasam import methods
from deltasam.lab.catalogue import METHODS, find_method
from deltasam.lab.cli import _sources
from deltasam.lab.cli._sources import classes_in
from deltasam.lab.cli.lists import _summary
from deltasam.lab.experiments import REGULARISERS
from deltasam.lab.experiments._parts import to_method
from deltasam.lab.experiments.plain import merge
from deltasam.step.names import method_key


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("per-instance", "PerInstanceSAM"),
        ("per-instance SAM", "PerInstanceSAM"),
        ("δ-SAM", "DeltaSAM"),
        ("friendly", "FriendlySAM"),
        ("plain", "ERM"),
        ("sam", "SAM"),
        ("a-sam", "ASAM"),
    ],
)
def test_names_as_people_write_them(name: str, kind: str) -> None:
    assert find_method(name).__name__ == kind
    assert type(to_method({"name": name})).__name__ == kind
    assert merge({"method": {"name": kind, "x": 1}}, {"method": name})["method"]["x"] == 1  # the same method


def test_no_two_methods_share_a_name() -> None:
    assert len({method_key(name) for name in METHODS}) == len(METHODS)


def test_the_list_from_the_sources_is_that_of_the_classes() -> None:
    assert list(classes_in(*_sources.METHODS)) == list(METHODS)
    for table, known in ((_sources.METHODS, METHODS), (_sources.REGULARISERS, REGULARISERS)):
        found = {name: (kind.cost, _summary(kind)) for name, kind in known.items()}
        assert classes_in(*table) == found


def test_unknown_names_get_the_nearest_or_all() -> None:
    with pytest.raises(ValueError, match="'delta-smm' is not a method; did you mean DeltaSAM"):
        find_method("delta-smm")
    with pytest.raises(ValueError, match="there are ERM, SAM, DeltaSAM"):
        find_method("xyzzy")
