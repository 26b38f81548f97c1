"""The base classes of objectives: a batch goes in, one loss per instance comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deltasam.objectives.batch import Labels, Predict, call, inputs_of, labels_of, tensor_of
from deltasam.objectives.observing import expect


class Objective(ABC):
    r"""Maps a model and a batch to the losses of the instances, :math:`l_i(w)`, shape ``(N,)``.

    The losses are scaled so that the objective of the batch is their **mean**. For a loss averaged over tokens that
    means :math:`l_i = N \cdot \sum_t \mathrm{nll}_{it} / \mathrm{tokens\ in\ the\ batch}`.

    Methods only need ``objective(model, batch) -> (N,)``, so any such callable works. The three parts below exist for
    the consistency regularisers (R-Drop, R3F, SMART, VAT), which compare two sets of outputs.

    An objective with trainable weights is also a module: ``class Tempered(Classification, nn.Module)``, or the bases
    in the other order. It is called as an objective, and its state is the module's.

    Attributes:
        separable: Whether the loss of an instance depends on that instance alone, so that a batch may be cut into
            single instances. False if the instances of a batch serve each other as negatives.
        mixing: Why the losses are not separable, for error messages.
        directional: Whether the divergence is the mean of two directed ones (Kullback-Leibler), see :meth:`directed`.
    """

    separable: ClassVar[bool] = True
    mixing: ClassVar[str] = "compares the instances of a batch with each other"
    directional: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes a class that is also a module work as both, whichever base comes first."""
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):
            _be_both(cls)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Losses of the instances, shape ``(N,)``, with their graph."""
        return self.losses(self.forward(model, batch), batch)

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Outputs of the model that the losses and divergences are computed from (logits, predictions, embeddings)."""

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Losses of the instances from the outputs, shape ``(N,)``."""

    @abstractmethod
    def divergence(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        """The distance of two outputs for the same batch, per instance, shape ``(N,)``: symmetric, zero if equal."""

    def directed(self, first: Tensor, second: Tensor, batch: Any) -> Tensor:
        r"""Divergence of the second outputs from the first, :math:`KL(p_1 \| p_2)` for distributions, shape ``(N,)``.

        The divergence itself if it has no direction (``directional`` is False).
        """
        return self.divergence(first, second, batch)

    def items(self, batch: Any) -> Tensor | None:
        """The divisor of the mean if it is not the number of instances (for example the number of target tokens).

        Micro-batches are weighted by it, so that their sum is the objective of the large batch.
        """
        return None

    def check_parts(self, batches: Sequence[Any]) -> None:  # noqa: B027 - most objectives take any batch
        """Called before a step over several micro-batches; raises if all of them together contain no target."""

    @property
    def has_unperturbed_part(self) -> bool:
        """Whether a part of the outputs stays at w while the weights are perturbed, see :meth:`unperturbed`."""
        return False

    def unperturbed(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The part of the outputs that stays at w while the weights are perturbed, with its graph; None if none does.

        An adversary on one of two views is such an objective: the embeddings of the other view are computed at w and
        passed to :meth:`complete` in every pass of the step.
        """
        return None

    def complete(self, model: nn.Module, batch: Any, unperturbed: Tensor) -> Tensor:
        """All outputs, as :meth:`forward` returns them, from the part at w and a pass over the rest of the batch."""
        raise NotImplementedError(
            f"{type(self).__name__} has no part of its outputs that stays at w: call forward(model, batch)"
        )

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - most objectives have nothing to prepare
        """Called once at the start of every step, before any pass, with the model at w (SMART moves its teacher)."""

    def prepare_batch(self, model: nn.Module, batch: Any) -> Any:
        """Called once per batch at the start of a step, with the model at w; returns the batch that all passes use.

        Rearranges a batch whose rows are not instances, and adds what is the same in every pass: :class:`DPO` puts the
        two answers of a pair into one row, and adds the log-probabilities of the reference.
        """
        expect(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; empty for objectives without state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but load_state_dict got {sorted(state)}")


def _be_both(kind: type) -> None:
    """Takes calls from the objective and state from the module, unless the class defines them; initialises the module.

    Such an objective is equal only to itself, as a module is, and not to all with the same fields, as a dataclass is:
    of equal modules inside another one torch finds only the weights of the first.
    """
    own = [each for each in kind.__mro__ if each not in (Objective, nn.Module)]
    modules = [each for each in own if issubclass(each, nn.Module)]
    for base, names, among in (
        (Objective, ("__call__", "forward"), own),
        (nn.Module, ("state_dict", "load_state_dict"), own),
        (object, ("__eq__", "__hash__"), modules),
    ):
        for name in names:
            setattr(kind, name, next(vars(each)[name] for each in (*among, base) if name in vars(each)))
    if not any("__new__" in vars(each) for each in modules):
        kind.__new__ = _new_module  # type: ignore[assignment, method-assign]


def _new_module(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``__new__`` of objectives that are modules: the ``__init__`` of a dataclass does not call the module's."""
    made = object.__new__(kind)
    nn.Module.__init__(made)
    return made


@dataclass(frozen=True, kw_only=True)
class Supervised(Objective):
    """An objective whose batch consists of inputs and labels; the model sees only the inputs.

    Args:
        labels: Key of the labels in the batch, or a callable that returns the labels of a batch.
        predict: How to get the outputs, ``predict(model, batch)``. By default the model is called with a mapping
            (Hugging Face's ``BatchEncoding`` included) by keywords, without the labels, or with the inputs of a pair
            ``(inputs, labels)``.
    """

    labels: Labels = "labels"
    predict: Predict | None = None

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return tensor_of(self.outputs(model, batch), "logits", type(self).__name__)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """What the model, or ``predict``, returns."""
        return call(model, self.inputs(model, batch)) if self.predict is None else self.predict(model, batch)

    def inputs(self, model: nn.Module, batch: Any) -> Any:
        """The inputs of the model: the batch without its labels."""
        return inputs_of(batch, self.labels, type(self).__name__)

    def targets(self, batch: Any) -> Tensor:
        """Labels of the batch."""
        return labels_of(batch, self.labels, type(self).__name__)


def load_objective(objective: Any, state: dict[str, Any]) -> None:
    """Restores the state of an objective. A module without saved state keeps its weights, as a model does."""
    if state or not isinstance(objective, nn.Module):
        objective.load_state_dict(state)


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32 if they are in half precision; float32 and float64 are unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def symmetric_kl(first: Tensor, second: Tensor) -> Tensor:
    r""":math:`\frac12 [KL(p\|q) + KL(q\|p)]` over the last dimension of two sets of logits, in float32 at least."""
    log_p = at_least_float32(first).log_softmax(-1)
    log_q = at_least_float32(second).log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)


def directed_kl(first: Tensor, second: Tensor) -> Tensor:
    r""":math:`KL(p\|q)` over the last dimension of two sets of logits, in float32 at least."""
    log_p = at_least_float32(first).log_softmax(-1)
    log_q = at_least_float32(second).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
