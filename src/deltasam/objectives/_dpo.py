"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.objectives._base import Objective, at_least_float32, directed_kl, symmetric_kl
from deltasam.objectives._checks import check_choice, check_positive
from deltasam.objectives._reference import Reference, reference_of
from deltasam.objectives.batch import Predict, call, describe, tensor_of, without_cache
from deltasam.objectives.observing import expect, see
from deltasam.objectives.preference import SMOOTHED, LogRatios, PreferenceLoss, preference_losses

_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
_NOT_INPUTS = ("completion_mask", *_REFERENCES)
_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DPO(Objective):
    r"""Direct preference optimization: an instance is a pair of a chosen and a rejected answer to a prompt.

    .. math:: l_i = -\log \sigma\!\left(\beta \left[\log \frac{\pi_w(y_c|x)}{\pi_{ref}(y_c|x)} -
              \log \frac{\pi_w(y_r|x)}{\pi_{ref}(y_r|x)}\right]\right)

    for ``loss_type="sigmoid"``; log-probabilities are sums over the tokens of an answer, in float32 at least. The mean
    is the loss of TRL's ``DPOTrainer``.

    A batch is what TRL's collator returns: ``input_ids`` (2N, T) with the N chosen answers before the N rejected ones,
    ``attention_mask``, and ``completion_mask``, which is 1 at the tokens of the answers. At the start of a step it is
    brought into the form (N, 2, T), one pair per row, so that methods can take single pairs out of it. You may also
    pass it in that form.

    *The reference* is computed once per step, before any pass, without a gradient, without dropout, and at the
    unperturbed weights: a method that perturbs the frozen base of an adapter does not perturb the reference. In this
    order it is taken from the columns ``ref_chosen_logps`` and ``ref_rejected_logps`` (N,) of the batch; from
    ``reference``; or from the model with its PEFT adapters disabled. Cost: one forward without a graph per step;
    nothing with the columns.

    The divergence of two outputs is the symmetric Kullback-Leibler divergence of the predicted distributions, averaged
    over the tokens of the two answers.

    Args:
        beta: How strongly the model is kept close to the reference.
        label_smoothing: Share of the pairs whose labels are assumed to be wrong, below 0.5: for ``"sigmoid"``
            (conservative DPO; TRL's trainer ignores it there), ``"robust"`` and ``"exo_pair"``.
        loss_type: One of TRL's losses of single pairs: ``"sigmoid"``, ``"hinge"``, ``"ipo"`` and others.
        reference: A frozen model, or the name of a frozen adapter of the model; by default the model with its adapters
            disabled.
        predict: How to get the logits (2N, T, V), ``predict(model, inputs)``, if a plain call is not enough.

    Raises:
        ValueError: An argument is out of range, the batch has no pairs, or there is no reference.

    Example:
        >>> model, reference = nn.Embedding(7, 7), nn.Embedding(7, 7)
        >>> tokens = torch.tensor([[1, 2, 3], [1, 4, 5], [1, 2, 4], [1, 4, 6]])  # two chosen, two rejected
        >>> batch = {"input_ids": tokens, "completion_mask": torch.tensor([[0, 1, 1]] * 4)}
        >>> objective = DPO(beta=0.1, reference=reference, predict=lambda model, x: model(x["input_ids"]))
        >>> objective(model, batch).shape
        torch.Size([2])

    References:
        Rafailov et al. 2023, Direct Preference Optimization: Your Language Model is Secretly a Reward Model.
    """

    directional: ClassVar[bool] = True

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: PreferenceLoss = "sigmoid"
    reference: Reference = None
    predict: Predict | None = None

    def __post_init__(self) -> None:
        check_positive("DPO", "beta", self.beta, zero=False)
        check_choice("DPO", "loss_type", self.loss_type, PreferenceLoss)
        smoothing = self.label_smoothing
        if not 0 <= smoothing < 0.5:
            raise ValueError(f"DPO(label_smoothing={smoothing!r}): must be at least 0 and less than 0.5")
        if smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"DPO(label_smoothing={smoothing!r}) has no effect with loss_type={self.loss_type!r}: set it to 0, or "
                f"choose one of {list(SMOOTHED)}"
            )
        if self.loss_type == "exo_pair" and not smoothing:
            raise ValueError("DPO(loss_type='exo_pair') needs label_smoothing above 0, for example 1e-3")

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses of the pairs, shape (N,), with their graph."""
        pairs = self._with_reference(model, self.pairs(batch))
        return self.losses(self.forward(model, pairs), pairs)

    def prepare_batch(self, model: nn.Module, batch: Any) -> Any:
        """The batch with one pair per row, and the log-probabilities of the reference as columns."""
        pairs = self._with_reference(model, self.pairs(batch))
        expect(pairs)
        return pairs

    def pairs(self, batch: Any) -> dict[str, Any]:
        """The batch with one pair per row: tensors of 2N rows become (N, 2, ...). Others stay."""
        if not isinstance(batch, Mapping) or not {"input_ids", "completion_mask"} <= set(batch):
            raise ValueError(
                f"DPO: batch is {describe(batch)}, but must be a mapping with 'input_ids' and 'completion_mask', as "
                "TRL's DataCollatorForPreference returns it"
            )
        tokens = batch["input_ids"]
        rows = tokens.shape[0]
        if tokens.ndim == 3 and tokens.shape[1] == 2:
            return dict(batch)
        if tokens.ndim != 2 or rows % 2 or not rows:
            raise ValueError(
                f"DPO: input_ids have shape {tuple(tokens.shape)}, but must have (2N, T), N chosen answers and then N "
                "rejected ones, or (N, 2, T)"
            )

        def folded(name: str, value: Any) -> Any:
            if name in _REFERENCES or not isinstance(value, Tensor) or not value.ndim or value.shape[0] != rows:
                return value
            return torch.unflatten(value, 0, (2, rows // 2)).transpose(0, 1).contiguous()

        return {name: folded(name, value) for name, value in batch.items()}

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Logits (N, 2, T, V) of the chosen and the rejected answers."""
        pairs = self.pairs(batch)
        logits = self._logits(model, pairs)
        n, two, length = pairs["input_ids"].shape
        if logits.ndim != 3 or logits.shape[0] != n * two or logits.shape[1] < length:
            raise ValueError(
                f"DPO: logits have shape {tuple(logits.shape)}, but must have ({n * two}, {length}, V); return one "
                "logit per token from DPO(predict=...)"
            )
        # PEFT's prompt tuning returns logits for its virtual tokens, too, which come first.
        return torch.unflatten(logits[:, -length:], 0, (n, two))

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        pairs = self.pairs(batch)
        missing = [name for name in _REFERENCES if name not in pairs]
        if missing:
            raise ValueError(f"DPO: the batch has no column {missing[0]!r}: call prepare_batch(model, batch) first")
        labels = _targets(pairs).to(outputs.device)
        log_probs = _log_probs(outputs, labels)
        reference = torch.stack([pairs[name].to(log_probs) for name in _REFERENCES], 1)
        if reference.shape != log_probs.shape:
            raise ValueError(
                f"DPO: {_REFERENCES[0]} and {_REFERENCES[1]} have shape {tuple(pairs[_REFERENCES[0]].shape)}, but the "
                f"batch has {len(log_probs)} pairs: give one number per pair"
            )
        ratios = log_probs - reference
        see(self, outputs, pairs, labels=labels, log_probs=log_probs, ratios=ratios)
        tokens = pairs["completion_mask"].to(ratios.device).sum(-1)
        found = LogRatios(ratios[:, 0], ratios[:, 1], tokens[:, 0], tokens[:, 1])
        return preference_losses(found, self.loss_type, self.beta, self.label_smoothing)

    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return self._mean_over_tokens(symmetric_kl(first, second), batch)

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        return self._mean_over_tokens(directed_kl(first, second), batch)

    def _mean_over_tokens(self, values: Tensor, batch: Any) -> Tensor:
        ignored = _targets(self.pairs(batch)).to(values.device) == _IGNORED
        return values.masked_fill(ignored, 0.0).sum((1, 2)) / (~ignored).sum((1, 2)).clamp(min=1)

    def _logits(self, model: nn.Module, pairs: Mapping[str, Any]) -> Tensor:
        """Logits (2N, T, V); the two rows of a pair are adjacent."""
        n = pairs["input_ids"].shape[0]
        inputs = {
            name: value.flatten(0, 1) if isinstance(value, Tensor) and value.shape[:2] == (n, 2) else value
            for name, value in pairs.items()
            if name not in _NOT_INPUTS
        }
        inputs = without_cache(model, inputs)
        outputs = call(model, inputs) if self.predict is None else self.predict(model, inputs)
        return tensor_of(outputs, "logits", "DPO")

    def _with_reference(self, model: nn.Module, pairs: dict[str, Any]) -> dict[str, Any]:
        if all(name in pairs for name in _REFERENCES):
            return pairs
        with torch.no_grad(), reference_of(model, self.reference) as reference:
            log_probs = _log_probs(self.forward(reference, pairs), _targets(pairs))
        return {**pairs, _REFERENCES[0]: log_probs[:, 0], _REFERENCES[1]: log_probs[:, 1]}


def _targets(pairs: Mapping[str, Any]) -> Tensor:
    """The tokens of the answers, each at the position of the logits that predict it; -100 elsewhere: (N, 2, T)."""
    labels: Tensor = pairs["input_ids"].masked_fill(pairs["completion_mask"] == 0, _IGNORED)
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the answers, (N, 2)."""
    rows = at_least_float32(logits).flatten(0, 2)
    targets = labels.to(logits.device).long()
    nll = F.cross_entropy(rows, targets.flatten(), reduction="none", ignore_index=_IGNORED)
    return -nll.view(targets.shape).sum(-1)
