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
    """TRL's ``SFTTrainer`` whose gradients are a method's; see :class:`MethodMixin` for what is added.

    Everything before the step is TRL's: chat templates, completion-only losses, truncation, ``peft_config``. An
    instance is a row of the batch, its loss the mean over its target tokens times their share
    (:class:`~deltasam.objectives.CausalLM`), so that with ``SAM(rho=0)`` it is the plain ``SFTTrainer`` up to
    rounding: TRL sums its losses in another order. Prompt tuning is covered; for its exception see
    :class:`MethodTrainer`.

    The routers' loss of a mixture of experts is added with TRL's ``router_aux_loss_coef``. With gradient accumulation
    the micro-batches are weighted by their targets; in TRL they count the same. :class:`~deltasam.PerInstanceSAM`
    needs ``router_aux_loss_coef=0.0``.

    TRL's own ``entropy``, ``mean_token_accuracy`` and ``aux_loss`` are logged by evaluations only, ``num_tokens``
    never: they are by-products of a loss that the training does not compute.

    Args:
        *args: ``SFTTrainer``'s.
        method: What takes the gradients.
        objective: Losses of the instances; by default :class:`~deltasam.objectives.CausalLM`, the mean over tokens.
        capture: Record steps as CUDA graphs, one per batch shape; set ``pad_to_multiple_of`` in ``SFTConfig``.
        **kwargs: ``SFTTrainer``'s.

    Raises:
        ValueError: ``SFTConfig`` has a setting that the training would ignore: another loss than "nll", batches in
            which the instances are not rows (``padding_free``, ``packing`` by its default strategy), activation
            offloading.
    """

    _accounted_for = (SFTTrainer,)

    def __init__(
        self,
        *args: Any,
        method: Method = None,  # type: ignore[assignment]  # there has to be one, see MethodMixin
        objective: ObjectiveLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, method=method, objective=objective, **kwargs)
        if self.args.activation_offloading:
            raise ValueError(
                "activation_offloading=True follows one forward and one backward pass, a method makes several: set it "
                "to False; gradient_checkpointing=True saves memory too"
            )

    def _default_objective(self) -> ObjectiveLike | None:
        if self.args.loss_type not in ("nll", "chunked_nll"):  # the second is the first, in parts of the tokens
            raise ValueError(
                f"loss_type={self.args.loss_type!r} is a loss that the method does not know: set loss_type='nll', or "
                "pass objective=..., a callable objective(model, batch) -> losses of shape (N,)"
            )
        if self.padding_free:
            raise ValueError(
                "padding_free=True, and packing=True with packing_strategy='bfd', lay the whole batch end to end in "
                "one row, and a row is what a method takes for an instance: set packing=False, or "
                "packing_strategy='wrapped', whose rows are pieces of one length"
            )
        objective = super()._default_objective()
        # Older versions of TRL have no such argument and go by the model. TRL's smoothed loss leaves it out.
        has_factor = hasattr(self.args, "router_aux_loss_coef") and not self.args.label_smoothing_factor
        if has_factor and isinstance(objective, CausalLM):
            factor = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
            self._inferred = objective = replace(objective, router_aux_loss_coef=factor)
        return objective

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs; without the number of tokens, which TRL counts in a loss that the training does not compute."""
        for metrics in self._metrics.values():
            metrics.pop("num_tokens", None)
        super().log(logs, *args, **kwargs)
