"""A plugin for ``DELTASAM_PLUGINS``: a method, a weighting, a regulariser, a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltasam.lab.experiments import register
from deltasam.lab.tasks import DocstringTask
from deltasam.methods import SAM
from deltasam.objectives.regularisers import Wrapper
from deltasam.weighting import Weighting


@register
@dataclass(frozen=True, kw_only=True)
class WideSAM(SAM):
    """SAM by another name."""

    wide: float = 2.0


@register
@dataclass(frozen=True, kw_only=True)
class ByLoss(Weighting):
    """g_i = l_i ** power: no probe."""

    power: float = 1.0

    def probe(self, passes: Any, *, rho: float, eta: float, seed: Any) -> Callable[[Tensor], Tensor]:
        return lambda losses: losses**self.power


@register
@dataclass(frozen=True)
class Times(Wrapper):
    """The losses times a factor."""

    factor: float = 3.0

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.factor * self.objective.losses(outputs, batch)


register(DocstringTask(name="few-docstrings", train_rows=24, eval_rows=20, max_length=24))
