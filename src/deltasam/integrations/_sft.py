"""TRL's trainer for supervised fine-tuning of causal language models, with a method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trl import SFTTrainer

from deltasam.integrations._mixin import MethodMixin
from deltasam.methods import Method
from deltasam.objectives import CausalLM
from deltasam.step.passes import ObjectiveLike


class SFTMethodTrainer(MethodMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` with the gradients of a method; :class:`MethodMixin` describes what it adds.

    Everything before the step is TRL's: chat templates, completion-only losses, truncation, ``peft_config``. An
    instance is a row of the batch. Its loss is the mean over its target tokens times their share
    (:class:`~deltasam.objectives.CausalLM`), so with ``SAM(rho=0)`` it equals the plain ``SFTTrainer`` up to rounding:
    TRL sums its losses in another order. Prompt tuning is supported; for its exception see :class:`MethodTrainer`.

    The router loss of a mixture of experts is added with TRL's ``router_aux_loss_coef``. With gradient accumulation
    the micro-batches are weighted by their targets; in TRL they have equal weights.
    :class:`~deltasam.PerInstanceSAM` needs ``router_aux_loss_coef=0.0``.

    TRL's ``entropy``, ``mean_token_accuracy`` and ``aux_loss`` are logged by evaluations only, ``num_tokens`` never:
    TRL computes them in a loss that the training does not use.

    Args:
        *args: Arguments of ``SFTTrainer``.
        method: The method that computes the gradients.
        objective: Losses of the instances; by default :class:`~deltasam.objectives.CausalLM`, the mean over tokens.
        capture: Record steps as CUDA graphs, one per batch shape; set ``pad_to_multiple_of`` in ``SFTConfig``.
        **kwargs: Keyword arguments of ``SFTTrainer``.

    Raises:
        ValueError: ``SFTConfig`` has a setting that the training would ignore: another loss than "nll", batches whose
            rows are not instances (``padding_free``, ``packing`` with its default strategy), activation offloading.
    """

    _replaced_trainers = (SFTTrainer,)

    def __init__(
        self,
        *args: Any,
        method: Method = None,  # type: ignore[assignment]  # required, see MethodMixin
        objective: ObjectiveLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, method=method, objective=objective, **kwargs)
        if self.args.activation_offloading:
            raise ValueError(
                "activation_offloading=True supports one forward and one backward pass, but a method makes several: "
                "set it to False; gradient_checkpointing=True also saves memory"
            )

    def _default_objective(self) -> ObjectiveLike | None:
        if self.args.loss_type not in ("nll", "chunked_nll"):  # the second is the first, computed in chunks
            raise ValueError(
                f"loss_type={self.args.loss_type!r} is not supported: set loss_type='nll', or pass objective=..., a "
                "callable objective(model, batch) -> losses of shape (N,)"
            )
        if self.padding_free:
            raise ValueError(
                "padding_free=True, and packing=True with packing_strategy='bfd', put the whole batch into one row, "
                "but a method treats a row as an instance: set packing=False, or packing_strategy='wrapped', whose "
                "rows have equal length"
            )
        return super()._default_objective()

    def _infer_objective(self) -> Any:
        objective = super()._infer_objective()
        # Older versions of TRL have no such argument and use the model's. TRL's smoothed loss omits the router loss.
        has_factor = hasattr(self.args, "router_aux_loss_coef") and not self.args.label_smoothing_factor
        if has_factor and isinstance(objective, CausalLM):
            factor = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
            return replace(objective, router_aux_loss_coef=factor)
        return objective

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, without the number of tokens: TRL counts them in a loss that the training does not use."""
        for metrics in self._metrics.values():
            metrics.pop("num_tokens", None)
        super().log(logs, *args, **kwargs)
