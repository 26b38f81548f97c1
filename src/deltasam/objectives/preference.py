r"""The losses of preference optimization, from the log-ratios of the pairs.

:math:`r_c = \log \pi(y_c|x) - \log \pi_{ref}(y_c|x)` is the log-ratio of the chosen answer, :math:`r_r` that of the
rejected one, each a sum over the tokens of the answer. The names are those of TRL's ``DPOConfig(loss_type=...)``.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down",
]  # fmt: skip

SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""The losses that label smoothing changes."""


class LogRatios(NamedTuple):
    """The log-ratios of the pairs and the number of tokens of the answers, each of shape (N,)."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def per_token(self) -> Tensor:
        """The difference of the mean log-ratios of the tokens."""
        chosen = self.chosen / self.chosen_tokens.clamp(min=1)
        return chosen - self.rejected / self.rejected_tokens.clamp(min=1)


def preference_losses(ratios: LogRatios, loss: PreferenceLoss, beta: float, smoothing: float = 0.0) -> Tensor:
    r"""Losses of the pairs, shape (N,); :math:`\Delta = r_c - r_r`.

    ``sigmoid``: :math:`-(1-s)\log\sigma(\beta\Delta) - s\log\sigma(-\beta\Delta)` with the smoothing s (conservative
    DPO); ``hinge``: :math:`\max(0, 1 - \beta\Delta)`; ``ipo``: :math:`(\bar\Delta - 1/2\beta)^2` with the difference
    of the means over tokens. The others as in TRL.
    """
    chosen, rejected = ratios.chosen, ratios.rejected
    margin = beta * (chosen - rejected)
    if loss == "sigmoid":
        kept = -logsigmoid(margin)
        return kept if not smoothing else (1 - smoothing) * kept - smoothing * logsigmoid(-margin)
    if loss == "hinge":
        return (1 - margin).relu()
    if loss == "ipo":
        return (ratios.per_token - 1 / (2 * beta)) ** 2
    if loss == "sigmoid_norm":
        return -logsigmoid(beta * ratios.per_token)
    if loss == "robust":
        return (smoothing * logsigmoid(-margin) - (1 - smoothing) * logsigmoid(margin)) / (1 - 2 * smoothing)
    if loss == "exo_pair":
        kept = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-smoothing))
        return kept + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(smoothing))
    if loss == "nca_pair":
        either = logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)
        return -logsigmoid(beta * chosen) - 0.5 * either
    if loss == "bco_pair":
        return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
    if loss == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if loss == "apo_zero":
        return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
    return (beta * chosen).sigmoid() + 1 - margin.sigmoid()  # apo_down
