"""LookSAM: look for the perturbation every k-th step only, and reuse what it changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasam.methods._base import Method, Step, check_number, finish, plain_step
from deltasam.passes import Passes
from deltasam.perturb import dot, global_norm


@dataclass(frozen=True, kw_only=True)
class LookSAM(Method):
    r"""LookSAM: on every k-th step SAM's gradient :math:`g_s`, whose part orthogonal to the plain gradient is kept;

    .. math:: g_v = g_s - \frac{\langle g_s, g \rangle}{\lVert g \rVert^2}\, g, \qquad
              \text{between: gradient} = g + \alpha \frac{\lVert g \rVert}{\lVert g_v \rVert}\, g_v

    with the norms over all parameters together.

    Cost: 1 + 1/k forwards and backwards on average; one copy of the parameters is kept between the steps (``g_v``, in
    :meth:`state_dict`), a second one on every k-th step. A step is a call of ``backward``: with accumulation, pass
    :class:`~deltasam.MicroBatches` so that all parts of a batch belong to the same step.

    Attributes:
        rho: Radius of the perturbation.
        k: SAM is done on every k-th step.
        alpha: Weight of the reused part.

    References:
        Liu et al., Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR 2022.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = LookSAM(k=3)
        >>> [method.backward(model, torch.rand(4, 2), objective).forwards for _ in range(6)]
        [2, 1, 1, 2, 1, 1]
    """

    rho: float = 0.05
    k: int = 5
    alpha: float = 0.7
    passes = "1+1/k"

    def __post_init__(self) -> None:
        """Checks the hyperparameters."""
        super().__post_init__()
        check_number("rho", self.rho, 0)
        check_number("k", self.k, 1)
        check_number("alpha", self.alpha, 0)

    def _step(self, passes: Passes) -> Step:
        if self._is_plain():
            return plain_step(passes)
        if self.steps % self.k == 0 or "gv" not in self.state:
            return self._look(passes)
        return self._reuse(passes)

    def _look(self, passes: Passes) -> Step:
        losses, plain = passes.gradient(params=list(passes.trainable.values()))
        g = {name: value for name, value in zip(passes.trainable, plain, strict=True) if value is not None}
        with passes.fresh_grads() as trained:
            with passes.ascend([g.get(name) for name in passes.params], self.rho, consume=False) as ascent:
                perturbed = passes.accumulate()
            with torch.no_grad():
                both = [n for n in g if trained[n].grad is not None]
                gs = [trained[n].grad.to_dense() for n in both]  # type: ignore[union-attr]
                g_both = [g[n].to_dense() for n in both]
                share = dot(gs, g_both) / dot(g_both, g_both)
                gv = {n: s - share.to(s.device, s.dtype) * p for n, s, p in zip(both, gs, g_both, strict=True)}
                self.state["gv"] = gv
                # Without a perturbation gs is g, and what is left of it is rounding (or nothing finite).
                self.state["gv_usable"] = torch.isfinite(global_norm(list(gv.values()))) & ~ascent.skipped
        return finish(passes, losses, perturbed=perturbed, ascent=ascent)

    def _reuse(self, passes: Passes) -> Step:
        gv: dict[str, Tensor] = self.state["gv"]
        with passes.fresh_grads() as trained:
            losses = passes.accumulate(at_w=True)
            with torch.no_grad():
                both = [n for n in gv if n in trained and trained[n].grad is not None]
                grads = [trained[n].grad.to_dense() for n in both]  # type: ignore[union-attr]
                vertical = [gv[n].to(trained[n].device) for n in both]
                factor = self.alpha * global_norm(grads) / global_norm(vertical)
                good = torch.isfinite(factor) & self.state["gv_usable"].to(factor.device)
                for name, g, v in zip(both, grads, vertical, strict=True):
                    here, use = factor.to(v.device, v.dtype), good.to(v.device)
                    trained[name].grad = g + torch.where(use, here * v, torch.zeros_like(v))
        return finish(passes, losses)
