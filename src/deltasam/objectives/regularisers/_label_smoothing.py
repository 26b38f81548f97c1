"""Label smoothing of any objective that has it, as a regulariser that a configuration can name."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass

from torch import nn

from deltasam.objectives._base import Objective
from deltasam.objectives._checks import check_smoothing
from deltasam.objectives._classification import Classification
from deltasam.objectives._tokens import Tokens
from deltasam.objectives.regularisers._wrapper import Wrapper


@dataclass(frozen=True)
class LabelSmoothing(Wrapper):
    r"""The wrapped objective with a share s of the label's probability spread evenly over all C classes.

    .. math:: l_i = (1 - s)\, l(f(x_i), y_i) + \tfrac sC \textstyle\sum_c l(f(x_i), c)

    It sets ``label_smoothing`` of the objective inside: :class:`~deltasam.Classification`, or one over tokens
    (:class:`~deltasam.Tokens`, :class:`~deltasam.CausalLM`, :class:`~deltasam.Seq2Seq`), where the classes are the
    whole vocabulary. In code you can set that option yourself; this class is for configurations of runs, in which the
    task chooses the objective. Losses stay those of the instances, so every method works. Evaluate with the wrapped
    objective.

    Cost: none.

    Args:
        objective: The objective to smooth, which may be inside other regularisers.
        smoothing: s, the share; 0 changes nothing.

    Raises:
        ValueError: The objective has no classes (regression), has another smoothing already, or ``smoothing`` is not
            in [0, 1).

    References:
        Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016.

    Example:
        >>> from deltasam import Classification
        >>> LabelSmoothing(Classification(), smoothing=0.1).objective.label_smoothing
        0.1
    """

    cost = "1/1"
    _: KW_ONLY
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.smoothing)
        object.__setattr__(self, "objective", _smoothed(self.objective, self.smoothing))


def _smoothed(objective: Objective, smoothing: float) -> Objective:
    """The objective with the smoothing set in the innermost one."""
    if isinstance(objective, Wrapper):
        return dataclasses.replace(objective, objective=_smoothed(objective.objective, smoothing))
    if not isinstance(objective, (Classification, Tokens)):
        raise ValueError(
            f"LabelSmoothing(objective={type(objective).__name__}): has no classes to spread probability over; use it "
            "with Classification, Tokens, CausalLM or Seq2Seq, and leave it out for other objectives"
        )
    if isinstance(objective, nn.Module):  # a copy would have other weights than those that the optimizer trains
        raise ValueError(
            f"LabelSmoothing(objective={type(objective).__name__}): has weights of its own; set its label_smoothing"
        )
    if objective.label_smoothing not in (0, smoothing):
        raise ValueError(
            f"LabelSmoothing(smoothing={smoothing}): {type(objective).__name__} has label_smoothing="
            f"{objective.label_smoothing} already; set that one instead"
        )
    return dataclasses.replace(objective, label_smoothing=smoothing)
