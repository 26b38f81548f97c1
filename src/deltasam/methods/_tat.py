"""TAT: FreeLB towards the class that the true class is most often mistaken for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from deltasam.methods._embedding_ascent import EmbeddingAscent
from deltasam.methods._fields import choice, number
from deltasam.methods._freelb import FreeLB
from deltasam.objectives import Classification, at_least_float32
from deltasam.objectives.regularisers import Wrapper
from deltasam.step.passes import Passes
from deltasam.step.randomness import seeded_generator

Target = Literal["most", "sampled"]


@dataclass(frozen=True, kw_only=True)
class TAT(FreeLB):
    r"""TAT: :class:`FreeLB` with a targeted ascent, towards a class :math:`c_i` other than :math:`y_i`.

    .. math:: \delta_i \leftarrow \Pi\Bigl(\delta_i - \alpha \frac{\nabla_\delta l(f(E_i + \delta_i), c_i)}
              {\lVert \nabla_\delta l(f(E_i + \delta_i), c_i) \rVert}\Bigr)

    :math:`c_i` is the class that instances of class :math:`y_i` have most often been mistaken for. The mistakes are
    counted in the first pass of every step; the counts of earlier steps decide. For a class without any, the target
    is the most likely wrong class. The parameters are trained on the true labels at the adversarial embeddings, as in
    FreeLB. (The original adds the adversary to a consistency term instead.)

    Without classes (regression, sequences, several labels per instance) there is no target, and TAT is
    :class:`FreeLB`. Objectives that wrap :class:`~deltasam.Classification` are unwrapped.

    Cost: K forwards, 2K - 1 backwards, of which K - 1 go into the embeddings alone; a (C, C) table of counts, in
    :meth:`state_dict`.

    Attributes:
        target: ``"most"``: the most frequent mistake; ``"sampled"``: in proportion to the counts, as in the original.
        decay: Factor on the earlier counts in every step; below 1 they fade.

    The other hyperparameters are those of :class:`FreeLB`.

    References:
        Pereira et al., Targeted Adversarial Training for Natural Language Understanding, NAACL 2021.

    Example:
        >>> from deltasam import Classification
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(8, 3))
        >>> batch = (torch.randint(9, (4, 2)), torch.tensor([0, 1, 2, 0]))
        >>> method = TAT(embeddings="0")
        >>> step = method.backward(model, batch, Classification())
        >>> step.forwards, step.backwards, method.state_dict()["confusion"].shape
        (3, 5, torch.Size([3, 3]))
    """

    target: Target = choice("most", Target)
    decay: float = number(1.0, high=1)
    cost = "K/2K-1"
    buffers = ("confusion",)

    def _goal(self, passes: Passes) -> Any:
        inner = passes.objective
        while isinstance(inner, Wrapper):
            inner = inner.objective
        if not isinstance(inner, Classification) or inner.multi_label:
            return None
        return _Targets(self, inner)

    def _finish(self, ascent: EmbeddingAscent) -> None:
        if isinstance(ascent.goal, _Targets) and ascent.goal.mistakes is not None:
            new = ascent.goal.mistakes
            self.table("confusion", new.shape, device=new.device).mul_(self.decay).add_(new)


class _Targets:
    """The target classes of one step, and the mistakes counted in its first pass."""

    def __init__(self, method: TAT, objective: Classification) -> None:
        self._method = method
        self._objective = objective
        self._chosen: dict[int, Tensor] = {}
        self.mistakes: Tensor | None = None

    def __call__(self, outputs: Tensor, batch: Any, micro_batch: int) -> Tensor:
        """Minus the loss with the target as the label: its ascent leads to the target."""
        logits = outputs.reshape(-1, *outputs.shape[-2:])  # views of wrappers in front
        labels = self._objective.targets(batch).long().to(logits.device)
        if micro_batch not in self._chosen:
            with torch.no_grad():
                self._chosen[micro_batch] = self._choose(logits.mean(0), labels, micro_batch)
        target = self._chosen[micro_batch].expand(len(logits), -1)
        return -F.cross_entropy(at_least_float32(logits).flatten(0, 1), target.flatten(), reduction="none")

    def _choose(self, logits: Tensor, labels: Tensor, micro_batch: int) -> Tensor:
        classes = logits.shape[-1]
        gold = F.one_hot(labels, classes).bool()
        counts = torch.zeros(classes, classes, device=logits.device)
        wrong = (logits.argmax(-1) != labels).to(counts.dtype)
        counts.index_put_((labels, logits.argmax(-1)), wrong, accumulate=True)
        self.mistakes = counts if self.mistakes is None else self.mistakes + counts

        likeliest = logits.masked_fill(gold, -torch.inf).argmax(-1)
        row = self._method.table("confusion", counts.shape, device=logits.device)[labels]
        if self._method.target == "most":
            frequent = row.argmax(-1)
        else:
            random = seeded_generator(logits.device, self._method.step_seed.child(micro_batch))
            frequent = torch.multinomial(row + (row.sum(-1, keepdim=True) == 0), 1, generator=random).squeeze(-1)
        return torch.where(row.sum(-1) > 0, frequent, likeliest)
