"""What the trainers for TRL have in common: its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.integrations._mixin import MethodMixin
from deltasam.integrations._output_metrics import OutputMetrics
from deltasam.objectives.observing import observed_outputs


class TRLMixin(MethodMixin):
    """Logs what TRL logs. TRL computes it in its own loss, which the training does not use.

    The values come from the outputs of the pass at w, averaged over the steps since the last entry, and over the
    processes.
    """

    _output_metrics: OutputMetrics | None = None
    _pending_tokens: Tensor | None = None

    def measure(self, objective: Any, outputs: Tensor, **values: Any) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Returns a sum and a count for every metric; None for an objective whose outputs it does not know."""
        raise NotImplementedError

    def _set_objective(self, objective: Any) -> None:
        super()._set_objective(objective)
        self._output_metrics = OutputMetrics(self.measure)

    def _method_step(self, model: nn.Module, batch: Any, num_items_in_batch: Any) -> Tensor:
        assert self._output_metrics is not None
        with observed_outputs(self._output_metrics.observe):
            loss = super()._method_step(model, batch, num_items_in_batch)
        self._output_metrics.add()
        tokens = _tokens(batch)
        if tokens is not None:
            self._pending_tokens = tokens if self._pending_tokens is None else self._pending_tokens + tokens
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Returns the evaluation loss, as TRL computes it."""
        self._count_tokens()  # TRL logs their number with the evaluation
        return super().compute_loss(model, inputs, return_outputs, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with TRL's metrics."""
        if self.model.training and self._output_metrics is not None:
            metrics = self._metrics["train"]
            for name, value in self._output_metrics.drain(lambda means: self._over_processes(means, "mean")).items():
                metrics[name] = [value]
            if self._pending_tokens is not None:
                self._count_tokens()
                metrics["num_tokens"] = [self._total_train_tokens]
        super().log(logs, *args, **kwargs)

    def _count_tokens(self) -> None:
        if self._pending_tokens is not None:
            counted = self._over_processes(self._pending_tokens, "sum")
            parallelism = getattr(self.accelerator, "parallelism_config", None)
            self._total_train_tokens += int(counted) // getattr(parallelism, "tp_size", 1)  # they see the same batch
            self._pending_tokens = None

    def _over_processes(self, values: Tensor, how: str) -> Tensor:
        found: Tensor = self.accelerator.reduce(values, how)
        return found


def _tokens(batch: Any) -> Tensor | None:
    """The number of tokens that TRL counts; None if the batch does not show it."""
    if not isinstance(batch, Mapping):
        return None
    if isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].sum()  # type: ignore[no-any-return]
    positions = batch.get("position_ids")
    return torch.full((), positions.numel(), device=positions.device) if isinstance(positions, Tensor) else None
