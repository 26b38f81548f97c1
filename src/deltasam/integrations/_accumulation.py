"""The weights of micro-batches in gradient accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltasam.step.batches import batch_size, part_of_a_step, ratio
from deltasam.step.checks import readable

_Base: Any = object  # a Trainer, once a class mixes this in


class AccumulationMixin(_Base):
    """Weights each micro-batch by its number of instances, or of what the objective counts (target tokens)."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Returns the micro-batches of one optimizer step, and their total number of instances or target tokens."""
        samples, _ = super().get_batch_samples(*args, **kwargs)
        # Trainer's own count is None or ignored for many heads (transformers#47688: gradients k times too large).
        batches = [self._objective_batch(inputs) for inputs in samples]
        counts = [self._count(batch) for batch in batches]
        if not counts or any(count is None for count in counts):
            return samples, None
        total = sum(counts)
        if isinstance(total, Tensor) and self.args.world_size > 1 and self.args.average_tokens_across_devices:
            # DDP averages over the processes, so each weighs its tokens against the average number.
            total = self.accelerator.gather(total.to(self.args.device)).sum() / self.args.world_size
        with part_of_a_step(isinstance(total, Tensor) and readable(total) and bool(total > 0)):
            getattr(self._objective, "check_parts", lambda batches: None)(batches)
        return samples, total

    def _count(self, batch: Any) -> Any:
        """Returns what the objective's mean divides by: its items (tokens) or the instances; None if unknown."""
        items = getattr(self._objective, "items", None)
        found = None if items is None else items(batch)
        return batch_size(batch) if found is None else found

    def _share(self, batch: Any, total: Any) -> Any:
        """Returns the weight of this micro-batch in the mean over all micro-batches of the optimizer step."""
        count = None if total is None else self._count(batch)
        if count is None:
            steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
            return 1.0 / steps
        return ratio(count, total)


class Scale:
    """The factor on the loss of a micro-batch: its share of the batch, times the scale of a ``GradScaler``."""

    def __init__(self, share: float | Tensor, scaler: Any) -> None:
        self._share = share
        self._scaler = scaler

    def fixed(self, device: torch.device) -> float | Tensor:
        """Returns the whole factor as one number, which a captured step can take as an input."""
        if self._scaler is None:
            return self._share
        return self.scale(torch.ones((), device=device))

    def share_of(self, value: Tensor) -> Tensor:
        """Multiplies the value by the share, in the value's dtype."""
        if isinstance(self._share, Tensor):
            return value * self._share.to(value.device, value.dtype)
        return value if self._share == 1 else value * self._share

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiplies the value by the whole factor."""
        part = self.share_of(outputs)
        scaled: Tensor = part if self._scaler is None else self._scaler.scale(part)
        return scaled
