"""What is measured once, after training: calibration, and the metrics with weights rounded to few bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from deltasam.step.checks import check_number

if TYPE_CHECKING:
    from deltasam.analysis import Calibration

Rounding = Literal["group", "channel"]
Metrics = dict[str, float]
Bins = list[list[float]]

_GROUPS: dict[Rounding, int | None] = {"group": 64, "channel": None}
_RESAMPLES = 1000
_QUALITY = ("nll", "brier", "ece")
_SCALED = ("temperature", "nll_scaled", "brier_scaled", "ece_scaled", "ece_low_scaled", "ece_high_scaled")


@dataclass(frozen=True)
class Measured:
    """Measurements after training.

    Attributes:
        metrics: Values by name. Those under another condition have its suffix: ``accuracy_4bit``, ``ece_on_qqp``.
        reliability: Bins ``[count, confidence, accuracy]`` of reliability diagrams, by condition.
    """

    metrics: Metrics = field(default_factory=dict)
    reliability: dict[str, Bins] = field(default_factory=dict)

    def __or__(self, other: Measured) -> Measured:
        """Returns both."""
        return Measured(self.metrics | other.metrics, self.reliability | other.reliability)


def quality(logits: Tensor, labels: Tensor) -> Metrics:
    """Returns log loss, Brier score and calibration error; NaN for a model that has diverged."""
    from deltasam.analysis import calibration

    if _diverged(logits):
        return dict.fromkeys(_QUALITY, math.nan)
    found = calibration(logits, labels)
    return {"nll": found.nll, "brier": found.brier, "ece": found.ece}


def quality_of_run(logits: Tensor, labels: Tensor) -> Measured:
    """Returns the quality with the interval of the calibration error, as it is and after temperature scaling.

    They are NaN for a model that has diverged, and without bins.
    """
    from deltasam.analysis import calibration, temperature, temperature_scaled

    if _diverged(logits):
        names = (*_QUALITY, "ece_low", "ece_high", *(_SCALED if len(labels) > 1 else ()))
        return Measured(dict.fromkeys(names, math.nan))
    found = calibration(logits, labels, resamples=_RESAMPLES)
    metrics = _with_interval(found)
    bins = {"evaluation": bins_of(found)}
    if len(labels) > 1 and math.isinf(found.nll):  # it is at every temperature
        metrics |= dict.fromkeys(_SCALED, math.nan)
    elif len(labels) > 1:
        scaled = calibration(temperature_scaled(logits, labels), labels, resamples=_RESAMPLES)
        metrics |= {"temperature": temperature(logits, labels)}
        metrics |= {f"{name}_scaled": value for name, value in _with_interval(scaled).items()}
        bins |= {"scaled": bins_of(scaled)}
    return Measured(metrics, bins)


def _with_interval(found: Calibration) -> Metrics:
    assert found.ece_interval is not None
    low, high = found.ece_interval
    return {"nll": found.nll, "brier": found.brier, "ece": found.ece, "ece_low": low, "ece_high": high}


def _diverged(logits: Tensor) -> bool:
    """Whether there are no probabilities. A class whose logit is -inf has one: it is impossible."""
    return bool(logits.softmax(-1).isnan().any())


def bins_of(calibration: Any) -> Bins:
    """Returns the bins of a reliability diagram as plain numbers."""
    return [[one.count, round(one.confidence, 6), round(one.accuracy, 6)] for one in calibration.bins]


def at_few_bits(
    model: Any, bits: Sequence[int], rounding: Sequence[Rounding], measure: Callable[[], Metrics]
) -> Iterator[tuple[str, float]]:
    """Yields what ``measure`` returns with the weights rounded in each way, with a suffix: ``accuracy_4bit``."""
    from deltasam.analysis import quantized

    for count in bits:
        for how in rounding:
            with quantized(model, count, group=_GROUPS[how]):
                found = measure()
            for name, value in found.items():
                yield f"{name}_{count}bit{'' if how == 'group' else '_channel'}", value


def check_bits(bits: Sequence[int]) -> None:
    """Raises an error unless all are numbers of bits."""
    for count in bits:
        check_number("task.bits", count, 1, 16, whole=True)
