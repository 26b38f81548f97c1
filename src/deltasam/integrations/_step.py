"""How a training step is made: the method's ``backward`` on one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.integrations._accumulation import Scale
from deltasam.integrations._precision import visible_autocast
from deltasam.methods import Step
from deltasam.speed.capture import Captured
from deltasam.step.batches import part_of_a_step
from deltasam.step.radius import Radius

_Base: Any = object  # a Trainer, once a class mixes this in


class StepMixin(_Base):
    """Replaces ``loss.backward()`` in the training step of a Trainer by the backward of a method."""

    captured: Captured | None

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator; batches are copied to a GPU asynchronously."""
        super().create_accelerator_and_postprocess()
        if self.args.device.type == "cuda":
            # A blocking copy waits until the device has finished all queued work, including the last step.
            self.accelerator.dataloader_config.non_blocking = True

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the method's backward on one micro-batch; returns its share of the loss at w."""
        self._require_objective()
        if not all(module.training for module in model.modules()):  # three times faster than train()
            model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes
            self.optimizer.train()
        batch = self._objective_batch(self._prepare_inputs(inputs))
        with part_of_a_step(num_items_in_batch is not None):  # get_batch_samples has checked the whole step
            return self._method_step(model, batch, num_items_in_batch)

    def _method_step(self, model: nn.Module, batch: Any, num_items_in_batch: Any) -> Tensor:
        self._check_first_batch(model, batch)
        if isinstance(getattr(self.method, "rho", None), Radius):
            self._set_progress()
        scale = Scale(self._share(batch, num_items_in_batch), self.accelerator.scaler)
        with self.compute_loss_context_manager(), visible_autocast(self.accelerator, model):
            step = self._backward(model, batch, scale)
        self.forwards += step.forwards
        self.backwards += step.backwards
        self._step_metrics.add(step)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and step.losses.device.type != "cpu":
            torch.get_device_module(step.losses.device).empty_cache()
        return scale.share_of(self._loss_filter.filtered(step.loss)).to(self.args.device)

    def _backward(self, model: nn.Module, batch: Any, scale: Scale) -> Step:
        """Runs the current method, which a callback may have replaced."""
        if self.captured is not None:
            if self.captured.method.state is not self.method.state:
                self.captured = Captured(self.method)  # the memory of the state is part of a recording
            self.captured.method = self.method
            fixed = scale.fixed(self.args.device)
            return self.captured.backward(model, batch, self._objective, scale=fixed)
        if self.splitting is not None:
            self.splitting.method = self.method
            split: Step = self.splitting.backward(model, batch, self._objective, scale=scale)
            return split
        step: Step = self.method.backward(model, batch, self._objective, scale=scale)
        return step

    def _set_progress(self) -> None:
        """Says where the training is, for a radius that is scheduled."""
        group = next(iter(self.optimizer.param_groups))
        peak = group.get("initial_lr")
        self.method.set_progress(
            step=self.state.global_step,
            total=self.state.max_steps,
            epoch=None if self.state.epoch is None else float(self.state.epoch),
            lr=float(group["lr"]) / float(peak) if peak else None,
        )

    def floating_point_ops(self, inputs: Any) -> Any:
        """Returns Trainer's count, computed once per input shape: Trainer visits all parameters in every step."""
        if not isinstance(inputs, Mapping):
            return super().floating_point_ops(inputs)
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = super().floating_point_ops(inputs)
        return self._operations[shapes]
