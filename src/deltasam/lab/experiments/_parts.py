"""The parts of a run that are chosen by name: task, method, weighting, radius, regularisers."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltasam import weighting
from deltasam.lab.catalogue import METHODS
from deltasam.lab.experiments._errors import ConfigError
from deltasam.lab.experiments.plain import Plain, build, is_option, option_types, options, plain
from deltasam.lab.plugins import VARIABLE, load_plugins
from deltasam.lab.tasks import TASKS, Task
from deltasam.methods import Method
from deltasam.objectives import Classification, Objective
from deltasam.objectives.regularisers import R3F, SMART, VAT, EmbeddingNoise, LabelSmoothing, NEFTune, RDrop
from deltasam.step.names import look_up, method_key, normalized, suggest
from deltasam.step.radius import Fixed, Groups, Layerwise, LossBudget, LossShare, Radius, Relative, Scheduled
from deltasam.weighting import Weighting

WEIGHTINGS: dict[str, type[Weighting]] = {
    name: getattr(weighting, name) for name in weighting.__all__ if getattr(weighting, name) is not Weighting
}
REGULARISERS: dict[str, type[Objective]] = {
    kind.__name__: kind for kind in (RDrop, R3F, SMART, VAT, EmbeddingNoise, NEFTune, LabelSmoothing)
}

RADII: dict[str, type[Radius]] = {
    kind.__name__: kind for kind in (LossBudget, LossShare, Relative, Layerwise, Scheduled)
}
_RADII_IN_RADII = ("rho", "at_most")  # options of a rule that are radii themselves

# Renamed options of methods, present name to former name. Run ids hash the former name, so that they stay the same.
FORMER_NAMES = {"scope": "sharpness"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Regulariser:
    """An objective that wraps the task's objective, by name and options.

    Attributes:
        name: Its class in :mod:`deltasam.objectives.regularisers`.
        options: Its hyperparameters.

    Example:
        >>> Regulariser("RDrop", {"alpha": 0.5}).wrap(Classification()).alpha
        0.5
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(self, objective: Objective, **more: Any) -> Objective:
        """Wraps an objective; ``more`` are options that only the run can set."""
        wrapped: Objective = REGULARISERS[self.name](objective, **{**self.options, **more})  # type: ignore[call-arg]
        return wrapped

    def takes(self, option: str) -> bool:
        """Whether the regulariser has this option and it is not set."""
        return option in option_types(REGULARISERS[self.name]) and self.options.get(option) is None


def to_task(given: Any) -> Task:
    """Returns a task from its name, or from a mapping with ``name`` and the options to change."""
    name, rest = _named(given, "task")
    base = _known(TASKS, name, "task")
    changes = options(type(base), rest, "task", leave_out=("name",))
    task: Task = build(lambda **fields: dataclasses.replace(base, **fields), changes, "task")
    return task


def to_method(given: Any) -> Method:
    """Returns a method from its name, or from a mapping with ``name`` and its hyperparameters."""
    name, rest = _named(given, "method")
    kind = _known(METHODS, name, "method", method_key)
    rest = _with_present_names(kind, rest)
    parts: Plain = {}
    if "weighting" in rest:
        parts["weighting"] = to_weighting(rest["weighting"], "method.weighting")
    if "rho" in rest and "rho" in option_types(kind):
        parts["rho"] = to_radius(rest["rho"], "method.rho")
    others = {key: value for key, value in rest.items() if key not in parts}
    method: Method = build(kind, {**options(kind, others, "method"), **parts}, "method")
    return method


def _with_present_names(kind: type, given: Plain) -> Plain:
    """Renames options that are given by a former name; if both names are given, the present one wins."""
    fields = {f.name for f in dataclasses.fields(kind)}
    changed = {old: new for new, old in FORMER_NAMES.items() if old in given and old not in fields and new in fields}
    for old, new in changed.items():
        _note_former_name(old, new)
    return {changed.get(key, key): value for key, value in given.items() if changed.get(key) not in given}


@functools.cache  # one note per process, not one per run folder that is read
def _note_former_name(old: str, new: str) -> None:
    _log.warning("method.%s is now called method.%s; configurations with the former name are still read", old, new)


def to_regulariser(given: Any, where: str) -> Regulariser:
    """Returns a regulariser from its name, or from a mapping with ``name`` and its options."""
    name, rest = _named(given, where)
    kind = _known(REGULARISERS, name, where)
    made = Regulariser(kind.__name__, options(kind, rest, where, leave_out=("objective",)))
    known = {"total_steps": 1} if made.takes("total_steps") else {}  # set by the run
    build(lambda: made.wrap(Classification(), **known), {}, where)  # runs its checks before any training
    return made


def to_weighting(given: Any, where: str) -> Weighting:
    """Returns a weighting from its name, or from a mapping with ``name`` and its options."""
    if isinstance(given, Weighting):
        return given
    name, rest = _named(given, where)
    kind = _known(WEIGHTINGS, name, where)
    rest = {key: to_weighting(value, f"{where}.{key}") if key == "of" else value for key, value in rest.items()}
    made: Weighting = build(kind, options(kind, rest, where), where)
    return made


def to_radius(given: Any, where: str) -> Any:
    """Returns a radius: a number, a rule from its name or a mapping with ``name``, or radii of groups of parameters.

    Example:
        >>> to_radius({"name": "loss-budget", "sigma": 0.1}, "method.rho").sigma
        0.1
        >>> to_radius({"embeddings": 0, "rest": "1e-2"}, "method.rho")["rest"]
        0.01
    """
    if isinstance(given, Radius):
        return given
    if isinstance(given, Mapping) and "name" not in given:
        return {key: to_radius(value, f"{where}.{key}") for key, value in given.items()}
    if isinstance(given, (str, Mapping)) and not _is_number(given):
        name, rest = _named(given, where)
        kind = _known(RADII, name, where)
        parts = {
            key: to_radius(rest[key], f"{where}.{key}")
            for key in _RADII_IN_RADII
            if key in rest and key in option_types(kind)
        }
        others = {key: value for key, value in rest.items() if key not in parts}
        return build(kind, {**options(kind, others, where), **parts}, where)
    return _number(given, where)


def _is_number(given: Any) -> bool:
    try:
        float(given)
    except (TypeError, ValueError):
        return False
    return True


def _number(given: Any, where: str) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not _is_number(given):
        names = ", ".join(RADII)
        raise ConfigError(f"{where}={given!r}: must be a number, a rule ({names}), or radii of groups of parameters")
    return float(given)


def named_plain(record: Any) -> Plain:
    """Returns a task, method, weighting or regulariser as plain data with its name."""
    if isinstance(record, Task):
        return dict(plain(record))
    if isinstance(record, Regulariser):
        return {"name": record.name, **plain(record.options)}
    if isinstance(record, Fixed):
        return plain(record.rho)  # type: ignore[no-any-return]
    if isinstance(record, Groups):
        return {str(key): named_plain(rule) for key, rule in record.groups}
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if is_option(f)}
    by_name = (Weighting, Radius)
    described = {key: named_plain(it) if isinstance(it, by_name) else plain(it) for key, it in values.items()}
    return {"name": type(record).__name__, **described}


def _known(kinds: Mapping[str, Any], name: str, where: str, key: Callable[[str], str] = normalized) -> Any:
    """Looks up a name among the parts of the package and of the user's plugins."""
    load_plugins()
    found = look_up(kinds, name, key)
    if found is None:
        hint = suggest(name, kinds)
        plugin = "" if hint.startswith("did") else f"; for a plugin, add its file to {VARIABLE}"
        raise ConfigError(f"{where}: there is no {name!r}; {hint}{plugin}")
    return found


def _named(given: Any, where: str) -> tuple[str, Plain]:
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given!r}: must be a name, or a mapping with `name` and options")
    if "name" not in given:
        raise ConfigError(f"{where}: `name` is missing; it selects what the options {sorted(given)} belong to")
    return str(given["name"]), {key: value for key, value in given.items() if key != "name"}
