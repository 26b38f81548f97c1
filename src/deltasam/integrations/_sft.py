"""TRL's trainer for supervised fine-tuning of causal language models, with a method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from trl import SFTTrainer

from deltasam.integrations._documents import DocumentCollator
from deltasam.integrations._output_metrics import token_statistics
from deltasam.integrations._trl import TRLMixin
from deltasam.objectives import CausalLM, PackedCausalLM
from deltasam.objectives.packing import LENGTHS, is_packed, unpacked
from deltasam.step.passes import ObjectiveLike


class SFTMethodTrainer(TRLMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` with the gradients of a method; :class:`MethodMixin` describes what it adds.

    Everything before the step is TRL's: chat templates, ``completion_only_loss``, ``assistant_only_loss``, truncation,
    packing, ``peft_config``. An instance is a row of the batch. Its loss is the mean over its target tokens times
    their share (:class:`~deltasam.objectives.CausalLM`), so with ``SAM(rho=0)`` it equals the plain ``SFTTrainer`` up
    to rounding: TRL sums its losses in another order. Prompt tuning is supported; for its exception see
    :class:`MethodTrainer`.

    *Packing.* With ``padding_free=True``, or ``packing=True`` with its default strategy, an instance is a document of
    the pack (:class:`~deltasam.objectives.PackedCausalLM`). The pack goes through the model as it is if the method
    perturbs the batch (SAM, delta-SAM). Methods that perturb instances or embeddings, or that take some instances out
    of a batch, regularisers, your own ``objective`` and ``on_out_of_memory="split"`` get one padded row per document:
    the same losses, with padding. With ``packing_strategy="wrapped"``, which cuts documents, a row is an instance.

    The router loss of a mixture of experts is added with TRL's ``router_aux_loss_coef``. With gradient accumulation
    the micro-batches are weighted by their targets; in TRL they have equal weights.
    :class:`~deltasam.PerInstanceSAM` needs ``router_aux_loss_coef=0.0``.

    *Logging.* TRL's ``entropy``, ``mean_token_accuracy`` and ``num_tokens``, from the outputs of the pass at w, with
    no other forward; the first two only if the objective computes its losses from logits, as the default does. TRL's
    ``aux_loss`` is logged by evaluations only.

    Args:
        *args: Arguments of ``SFTTrainer``.
        method: The method that computes the gradients.
        objective: Losses of the instances; by default :class:`~deltasam.objectives.CausalLM`, the mean over tokens.
        capture: Record steps as CUDA graphs, one per batch shape; set ``pad_to_multiple_of`` in ``SFTConfig``. The
            number of documents of a pack is a part of its shape.
        **kwargs: Keyword arguments of ``SFTTrainer``.

    Raises:
        ValueError: ``SFTConfig`` has a setting that the training would ignore: another loss than "nll", or activation
            offloading.
    """

    replaces = (SFTTrainer,)

    def default_objective(self) -> ObjectiveLike | None:
        if self.args.loss_type not in ("nll", "chunked_nll"):  # the second is the first, computed in chunks
            raise ValueError(
                f"loss_type={self.args.loss_type!r} is not supported: set loss_type='nll', or pass objective=..., a "
                "callable objective(model, batch) -> losses of shape (N,)"
            )
        return super().default_objective()

    def _infer_objective(self) -> Any:
        objective = super()._infer_objective()
        if not isinstance(objective, CausalLM):
            return objective
        # Older versions of TRL have no such argument and use the model's. TRL's smoothed loss omits the router loss.
        if hasattr(self.args, "router_aux_loss_coef") and not self.args.label_smoothing_factor:
            factor = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
            objective = replace(objective, router_aux_loss_coef=factor)
        if self.padding_free and not objective.virtual_tokens:  # PEFT ignores positions with virtual tokens
            return PackedCausalLM(**vars(objective))
        return objective

    # -- packs ---------------------------------------------------------------------------------------------------

    def needs_rows(self) -> bool:
        """Whether the current method and objective need one row per document instead of the pack."""
        method = self.method
        perturbs_batch = method.perturbs in ("weights", "layers", "nothing") and not method.subsets_batch
        return not (perturbs_batch and isinstance(self._objective, PackedCausalLM)) or self.splitting is not None

    def get_train_dataloader(self) -> Any:
        """Returns TRL's data loader; its collator makes rows or packs of documents, as the method needs them."""
        if not self.padding_free:
            return super().get_train_dataloader()
        before: Any = self.data_collator  # type: ignore[has-type]
        # Only kernels for packed rows read their boundaries, and no two batches would share a graph because of them.
        self.data_collator = DocumentCollator(before, rows=self.needs_rows(), varlen=self.captured is None)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = before

    def _objective_batch(self, inputs: Any) -> Any:
        batch = super()._objective_batch(inputs)
        if self.padding_free and is_packed(batch) and self.needs_rows():  # a callback has replaced the method
            return unpacked(batch, pad_token_id=self.processing_class.pad_token_id)
        return batch

    def _check_first_batch(self, model: nn.Module, batch: Any) -> None:
        if is_packed(batch):
            batch = {name: value for name, value in batch.items() if name != LENGTHS}
        super()._check_first_batch(model, batch)

    # -- TRL's metrics -------------------------------------------------------------------------------------------

    def measure(self, objective: Any, outputs: Tensor, **values: Any) -> dict[str, tuple[Tensor, Tensor]] | None:
        if not isinstance(objective, CausalLM):
            return None
        labels = values["labels"]
        is_target = labels != objective.ignore_index
        entropy, top, _ = token_statistics(outputs.flatten(0, 1), labels.flatten())
        where, count = is_target.flatten(), is_target.sum()
        return {
            "entropy": (entropy.where(where, entropy.new_zeros(())).sum(), count),
            "mean_token_accuracy": ((top & where).sum(), count),
        }
