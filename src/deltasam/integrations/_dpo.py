"""TRL's trainer for direct preference optimization, with a method."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor
from trl import DPOTrainer

from deltasam.integrations._output_metrics import token_statistics
from deltasam.integrations._trl import TRLMixin
from deltasam.objectives import DPO
from deltasam.objectives.preference import SMOOTHED, PreferenceLoss
from deltasam.step.passes import ObjectiveLike


class DPOMethodTrainer(TRLMixin, DPOTrainer):
    """TRL's ``DPOTrainer`` with the gradients of a method; :class:`MethodMixin` describes what it adds.

    An instance is a pair of a chosen and a rejected answer (:class:`~deltasam.DPO`), so a perturbation of
    :class:`~deltasam.PerInstanceSAM` belongs to a pair. With ``SAM(rho=0)`` it equals the plain ``DPOTrainer`` up to
    rounding; with ``disable_dropout=False`` the dropout masks differ, because the two answers of a pair are adjacent,
    and the reference has no dropout.

    *The reference* is TRL's: the columns of ``precompute_ref_log_probs=True``; ``ref_model``; TRL's frozen copy of the
    adapter if the model came with one; else the model with its adapters disabled. It is computed once per step, and a
    perturbation never reaches it.

    *Logging.* TRL's ``rewards/*``, ``logps/*``, ``logits/*``, ``entropy``, ``mean_token_accuracy`` and ``num_tokens``,
    from the outputs of the pass at w, without another forward.

    Args:
        *args: Arguments of ``DPOTrainer``.
        method: The method that computes the gradients.
        objective: Losses of the pairs; by default :class:`~deltasam.DPO` with the settings of ``DPOConfig``.
        capture: Record steps as CUDA graphs, one per batch shape; set ``pad_to_multiple_of`` in ``DPOConfig``.
        **kwargs: Keyword arguments of ``DPOTrainer``.

    Raises:
        ValueError: ``DPOConfig`` has a setting that the training would ignore: several losses, or one that compares
            pairs with each other; ``f_divergence_type``, ``use_weighting``, ``ld_alpha``; the router loss of a mixture
            of experts; images; activation offloading.
    """

    replaces = (DPOTrainer,)

    def default_objective(self) -> ObjectiveLike | None:
        """Returns TRL's loss.

        Raises:
            ValueError: It is not a loss of single pairs, or has another term.
        """
        _refuse_other_losses(self)
        (loss,) = self.loss_types
        return DPO(
            beta=self.beta,
            loss_type=loss,
            # TRL uses it for these two only.
            label_smoothing=self.label_smoothing if loss in SMOOTHED and loss != "sigmoid" else 0.0,
            reference=self._reference(),
        )

    def _reference(self) -> Any:
        if self.ref_model is not None:
            return self.ref_model
        return "ref" if "ref" in getattr(self.model, "peft_config", {}) else None

    def measure(self, objective: Any, outputs: Tensor, **values: Any) -> dict[str, tuple[Tensor, Tensor]] | None:
        if not isinstance(objective, DPO):
            return None
        labels, log_probs = values["labels"], values["log_probs"]
        rewards = objective.beta * values["ratios"]
        found = token_statistics(outputs.flatten(0, 2), labels.flatten())
        where = labels != -100
        entropy, top, logits = (each.view_as(labels).where(where, each.new_zeros(())) for each in found)
        tokens, pairs = where.sum((0, 2)), labels.new_full((), labels.shape[0])
        margins = rewards[:, 0] - rewards[:, 1]
        return {
            "entropy": (entropy.sum(), tokens.sum()),
            "logits/chosen": (logits[:, 0].sum(), tokens[0]),
            "logits/rejected": (logits[:, 1].sum(), tokens[1]),
            "mean_token_accuracy": (top[:, 0].sum(), tokens[0]),
            "rewards/chosen": (rewards[:, 0].sum(), pairs),
            "rewards/rejected": (rewards[:, 1].sum(), pairs),
            "rewards/accuracies": ((margins > 0).sum(), pairs),
            "rewards/margins": (margins.sum(), pairs),
            "logps/chosen": (log_probs[:, 0].sum(), pairs),
            "logps/rejected": (log_probs[:, 1].sum(), pairs),
        }


def _refuse_other_losses(trainer: Any) -> None:
    """Raises a ValueError for settings of ``DPOConfig`` that :class:`DPO` does not have."""
    known, own = get_args(PreferenceLoss), "or pass objective=..., a callable objective(model, batch) -> (N,)"
    if len(trainer.loss_types) != 1 or trainer.loss_types[0] not in known:
        raise ValueError(f"loss_type={trainer.loss_types} is not supported: choose one of {list(known)}, {own}")
    if trainer.loss_weights != [1.0]:
        raise ValueError(f"loss_weights={trainer.loss_weights} is not supported: leave it out, {own}")
    without = {"f_divergence_type": "reverse_kl", "use_weighting": False, "ld_alpha": None}
    for name, value in without.items():
        if (given := getattr(trainer.args, name, value)) != value:
            raise ValueError(f"{name}={given!r} is not supported: set {name}={value!r}, {own}")
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "the router loss of a mixture of experts belongs to the whole batch, not to single pairs: train without "
            "it, DPOConfig(router_aux_loss_coef=0.0)"
        )
    if {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ()):
        raise ValueError(f"data sets with images are not supported: use a data set of texts, {own}")
