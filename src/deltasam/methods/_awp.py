"""AWP: adversarial weight perturbation in proportion to every tensor, beside the plain gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deltasam.methods._base import Method
from deltasam.methods._fields import number
from deltasam.methods._step import Step, make_step
from deltasam.parallel.shards import local, shard_like
from deltasam.step.norms import combine, dense, global_norm, step_size
from deltasam.step.passes import Passes


@dataclass(frozen=True, kw_only=True)
class AWP(Method):
    r"""AWP as in NLP competitions: the plain gradient plus the gradient at weights perturbed tensor by tensor.

    .. math:: \epsilon_t = \operatorname{clip}\Bigl(\alpha\, \lVert w_t \rVert_2\,
              \frac{\nabla_t l(w)}{\lVert \nabla_t l(w) \rVert_2},\; \pm \gamma\, |w_t|\Bigr), \qquad
              \text{gradient} = \nabla l(w) + \nabla l(w + \epsilon)

    for every tensor t whose name contains ``adv_param``; the bounds are entry by entry. With the usual
    :math:`\alpha = 1` nearly every entry is clipped, and :math:`\epsilon \approx \gamma\, |w| \operatorname{sign}
    (\nabla l)`: then :math:`\gamma` is the radius.

    The sum of two gradients is about twice as long as one. Adam is indifferent to that, SGD and clipping are not.
    Public code differs: some copies call ``backward`` a second time, which adds, others empty ``.grad`` before it
    (``add_plain=False``). They add 1e-6 to both norms, which is left out here, and start in a later epoch: use
    ``method.replace(adv_lr=0)`` until then. A tensor with a zero gradient stays where it is.

    Cost: 2 forwards, 2 backwards; two extra copies of the parameters (one is the plain gradient), a third one briefly
    between the passes.

    Attributes:
        adv_lr: :math:`\alpha`, the length of the step relative to the norm of the tensor; 0 is plain training.
        adv_eps: :math:`\gamma`, the largest change of an entry relative to its size; None for no bound.
        adv_param: What the name of a perturbed tensor contains; "" perturbs all that ``params`` selects.
        add_plain: Whether the plain gradient is added to that at the perturbed weights.

    Raises:
        ValueError: No name of a selected parameter contains ``adv_param``.

    References:
        Wu et al., Adversarial Weight Perturbation Helps Robust Generalization, NeurIPS 2020.

    Relations:
        Wu's AWP has no bound per entry and no plain gradient: ``AWP(adv_lr=gamma, adv_eps=None, add_plain=False)``
        with its relative size gamma (0.005 to 0.01). It is for adversarial inputs, which are the objective's task
        here. :class:`ASAM` also follows the size of the weights, with one radius for all tensors.

    Example:
        >>> model, objective = nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = AWP(adv_lr=1.0, adv_eps=0.01).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, bool(step.sharpness > 0)
        (2, 2, True)
    """

    adv_lr: float = number(1.0)
    adv_eps: float | None = number(0.01, optional=True)
    adv_param: str = "weight"
    add_plain: bool = True
    edits_gradient = True
    plain_ascent = False

    def is_erm(self) -> bool:
        """Whether nothing can move: a step of length 0, or bounds of 0."""
        return self.adv_lr == 0 or self.adv_eps == 0

    def _step(self, passes: Passes) -> Step:
        chosen = {name: p for name, p in passes.params.items() if self.adv_param in name}
        if not chosen:
            some = ", ".join(list(passes.params)[:3])
            raise ValueError(
                f"adv_param={self.adv_param!r} is in no name of the selected parameters ({some}, ...): pass a part of "
                "their names, or adv_param='' for all of them"
            )
        targets = passes.involved if self.add_plain else chosen
        losses, grads = passes.gradient(params=list(targets.values()))
        g = dict(zip(targets, grads, strict=True))
        del grads
        norm = global_norm([d for name in chosen if (d := g[name]) is not None]).to(passes.device)
        # Times the norm, by which the ascent divides: a gradient that is not finite then moves nothing.
        direction = [None if (d := g[name]) is None else self._move(p, d, norm) for name, p in chosen.items()]
        length = global_norm([d for d in direction if d is not None]).to(norm) / norm
        with passes.fresh_grads() as trained:
            g = {name: g[name] for name in trained} if self.add_plain else {}  # without those of frozen parameters
            with passes.ascend(direction, 1.0, norm=norm, params=list(chosen.values())) as ascent:
                perturbed = passes.accumulate()
            if self.add_plain:
                one = torch.ones_like(norm)
                # After a skipped ascent the gradient is the plain one, and the first may not be finite.
                share = torch.where(ascent.skipped, torch.zeros_like(one), one)
                for name, p in trained.items():
                    p.grad = combine(one, p.grad, share, g.pop(name))
        radius = torch.where(ascent.skipped, torch.zeros_like(length), length)
        return make_step(passes, losses, perturbed=perturbed, ascent=replace(ascent, radius=radius))

    @torch.no_grad()
    def _move(self, p: nn.Parameter, gradient: Tensor, norm: Tensor) -> Tensor:
        """The move of one tensor, times the norm of the whole gradient."""
        size = self.adv_lr * global_norm([p.detach()]) * step_size(1.0, global_norm([gradient]))
        here, w = dense(local(gradient)), local(p.detach())
        move = here * size.to(here)
        if self.adv_eps is not None:
            bound = self.adv_eps * w.abs()
            move = torch.minimum(torch.maximum(move, -bound), bound)
        return shard_like(move * norm.to(move), p)
