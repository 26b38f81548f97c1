"""Causal language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from deltasam.objectives._tokens import Tokens
from deltasam.objectives.batch import describe, tensor_of, without_cache

_WITHOUT_ROUTERS = (
    "to train without it set CausalLM(router_aux_loss_coef=0), with MethodTrainer "
    "model.config.output_router_logits = False, with SFTMethodTrainer SFTConfig(router_aux_loss_coef=0.0)"
)


@dataclass(frozen=True, kw_only=True)
class CausalLM(Tokens):
    r"""Cross-entropy of the next token, as one loss per sequence; the mean is Hugging Face's loss.

    The labels are the tokens themselves, ``ignore_index`` where a token does not count; they are shifted here, the
    logits at t predict label t + 1, so the first label of a sequence is never a target.

    PEFT's prompt tuning, P-tuning and multitask prompt tuning put virtual tokens in front of every sequence, and the
    model returns logits for them too. The last virtual token predicts the first label, which then is a target as well.
    :class:`~deltasam.integrations.MethodTrainer` reads ``virtual_tokens`` from the model. Prefix tuning returns no
    logits for its prefix and needs no setting.

    A mixture of experts may add a loss of its routers, which balances the load of the experts over all tokens of the
    batch. ``router_aux_loss_coef`` times that loss is added to the loss of every instance, so the mean is again the
    loss of the model. Such losses are not ``separable``: :class:`~deltasam.PerInstanceSAM` raises an error with both
    engines, and so does the splitting of batches. Regularisers, which see the logits only, raise an error too. Each
    micro-batch has its own router loss, weighted by its target tokens. ``SubsetSAM`` and ``ESAM`` compute it over the
    instances that they pick.

    The other arguments, the reduction and the errors are those of :class:`Tokens`.

    Args:
        virtual_tokens: Number of virtual tokens for which the model returns logits; ``num_virtual_tokens`` in PEFT.
        router_aux_loss_coef: Factor of the routers' loss, ``aux_loss`` in the outputs of the model; 0 leaves it out.

    Example:
        >>> import torch
        >>> model, tokens = torch.nn.Embedding(7, 7), torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> CausalLM()(model, (tokens, tokens)).shape, CausalLM().items((tokens, tokens))
        (torch.Size([2]), tensor(4))
    """

    _length_remedy: ClassVar[str] = (
        "if the model puts virtual tokens in front (PEFT's prompt tuning), set CausalLM(virtual_tokens=...); else "
        "return one logit per label from CausalLM(predict=...)"
    )

    virtual_tokens: int = 0
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.virtual_tokens < 0:
            raise ValueError(f"virtual_tokens is {self.virtual_tokens}, but must be at least 0")

    @property
    def separable(self) -> bool:  # type: ignore[override]  # a class variable of the base
        return not self.router_aux_loss_coef

    @property
    def mixing(self) -> str:  # type: ignore[override]
        return f"adds {self.router_aux_loss_coef} times a loss of the routers over the batch ({_WITHOUT_ROUTERS})"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if not self.router_aux_loss_coef:
            return super().__call__(model, batch)
        outputs = self.outputs(model, batch)
        router_loss = outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)
        if not isinstance(router_loss, Tensor):
            raise ValueError(
                f"CausalLM(router_aux_loss_coef={self.router_aux_loss_coef}): the model returned {describe(outputs)} "
                f"without a tensor 'aux_loss': {_WITHOUT_ROUTERS}"
            )
        losses = self.losses(self._at_targets(tensor_of(outputs, "logits", "CausalLM"), batch), batch)
        return losses + self.router_aux_loss_coef * router_loss.to(losses)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Logits (N, T, V) at the positions that predict the targets."""
        if self.router_aux_loss_coef:
            raise ValueError(
                f"CausalLM(router_aux_loss_coef={self.router_aux_loss_coef}) adds a loss of the routers, which is "
                f"lost where only the logits are used, as in regularisers: {_WITHOUT_ROUTERS}"
            )
        return self._at_targets(super().forward(model, batch), batch)

    def _at_targets(self, logits: Tensor, batch: Any) -> Tensor:
        if not self.virtual_tokens:
            return logits
        expected = self.targets(batch).shape[1] + self.virtual_tokens
        if logits.dim() != 3 or logits.shape[1] != expected:
            raise ValueError(
                f"CausalLM: logits have shape {tuple(logits.shape)}, but must have (N, {expected}, V) with "
                f"virtual_tokens={self.virtual_tokens} and {expected - self.virtual_tokens} labels per sequence; set "
                "virtual_tokens to the number of tokens that the model puts in front, 0 if there are none"
            )
        return logits[:, self.virtual_tokens - 1 : -1]

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        inputs = without_cache(model, super().inputs(model, batch))
        if self.router_aux_loss_coef and isinstance(inputs, Mapping):
            return {**inputs, "output_router_logits": True}
        return inputs

    def targets(self, batch: Any) -> Tensor:
        """Labels, each at the position of the logits that predict it."""
        return self._shifted(super().targets(batch))

    def _shifted(self, labels: Tensor) -> Tensor:
        if self.virtual_tokens:
            return labels
        # Shifting the labels instead of the logits saves a copy of the logits.
        return F.pad(labels, (0, 1), value=self.ignore_index)[:, 1:]
