"""LookSAM: SAM on every k-th step; the steps in between reuse its direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.methods._buffers import fitted, require_outside_recording
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.parallel.shards import local
from deltasam.step.norms import combine, dot, global_norm
from deltasam.step.passes import Passes
from deltasam.step.radius import Rho


@dataclass(frozen=True, kw_only=True)
class LookSAM(Method):
    r"""LookSAM: SAM's gradient on every k-th step; in between, the plain gradient plus what SAM added to it.

    .. math:: \text{k-th: gradient} = g_s, \quad g_v = g_s - \frac{\langle g_s, g \rangle}{\lVert g \rVert^2} g, \quad
              \text{between: gradient} = g + \alpha \frac{\lVert g \rVert}{\lVert g_v \rVert}\, g_v

    with norms over all parameters.

    Cost: 1 + 1/k forwards and backwards on average; one copy of the parameters is kept between the steps (``g_v``, in
    :meth:`state_dict`), a second one on every k-th step. A step is a call of ``backward``: with accumulation, pass
    :class:`~deltasam.MicroBatches` so that all parts of a batch belong to the same step.

    Attributes:
        rho: Radius of the perturbation.
        k: Every k-th step is SAM.
        alpha: Weight of the reused part.

    References:
        Liu et al., Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR 2022.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = LookSAM(k=3)
        >>> [method.backward(model, torch.rand(4, 2), objective).forwards for _ in range(6)]
        [2, 1, 1, 2, 1, 1]
    """

    rho: Rho = radius()
    k: int = number(5, low=1, whole=True)
    alpha: float = number(0.7)
    cost = "1+1/k"
    buffers = ("gv", "gv_usable")
    edits_gradient = True

    def capture_key(self) -> bool:
        """Whether the next step is SAM."""
        return self.steps % self.k == 0 or not self.state.get("gv")

    def _step(self, passes: Passes) -> Step:
        self.claim_buffers()
        return self._look(passes) if self.capture_key() else self._reuse(passes)

    def _look(self, passes: Passes) -> Step:
        losses, plain = passes.gradient(params=list(passes.involved.values()))
        g = dict(zip(passes.involved, plain, strict=True))
        del plain
        # The memory of the last g_v holds g until the new g_v replaces it: no second copy, and a captured step can
        # replay. Without "gv" in the state until then: if this step fails, the next one looks again.
        memory = self._lent(passes, g)
        with passes.fresh_grads() as trained:
            with passes.ascend([g[name] for name in passes.params], self.radius, consume=False) as ascent:
                perturbed = passes.accumulate()
            g = {name: g[name] for name in trained}  # without those of frozen parameters
            with torch.no_grad():
                gs = {name: p.grad for name, p in trained.items()}
                share = dot(list(gs.values()), list(g.values())) / dot(list(g.values()), list(g.values()))
                one = torch.ones_like(share)
                gv = {name: _stored(combine(one, gs[name], -share, g.pop(name)), memory.get(name)) for name in trained}
                found = {name: value for name, value in gv.items() if value is not None}
                # Without a perturbation, or where it only scales g, gv is rounding error (or not finite).
                whole = global_norm([value for value in gs.values() if value is not None])
                rounding = 4 * max((torch.finfo(value.dtype).eps for value in found.values()), default=0.0) * whole
                is_left = global_norm(list(found.values())) > rounding.to(share.device)
                usable = torch.isfinite(share) & ~ascent.skipped.to(share.device) & is_left.to(share.device)
                self.table("gv_usable", (), device=passes.device, dtype=torch.bool).copy_(usable)
        self.state["gv"] = found
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    @torch.no_grad()
    def _lent(self, passes: Passes, g: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Moves the gradients of trained parameters into the memory of g_v; sparse ones stay where they are."""
        kept = self.kept("gv", passes.trainable) or {}
        self.state["gv"] = {}
        memory = {name: place for name, place in kept.items() if not place.is_sparse}
        for name, p in passes.trainable.items():
            value = g.get(name)
            if value is not None and not value.is_sparse:
                memory[name] = memory[name] if name in memory else fitted(None, p)
                g[name] = _stored(value, memory[name])
        return memory

    def _reuse(self, passes: Passes) -> Step:
        kept = self.kept("gv", passes.trainable) or {}
        with passes.fresh_grads() as trained:
            losses = passes.accumulate(keep_side_effects=True)
            with torch.no_grad():
                g = {name: p.grad for name, p in trained.items() if p.grad is not None}
                gv = {name: value for name, value in kept.items() if name in trained}
                factor = self.alpha * global_norm(list(g.values())) / global_norm(list(gv.values()))
                good = torch.isfinite(factor) & self.state["gv_usable"].to(factor.device)
                factor = torch.where(good, factor, torch.zeros_like(factor))
                for name, p in trained.items():
                    p.grad = combine(torch.ones_like(factor), g.pop(name, None), factor, gv.get(name))
        return make_step(passes, losses)


def _stored(value: Tensor | None, place: Tensor | None) -> Any:
    """The value in this place; where it is if there is none, or if it is sparse."""
    if value is None or value.is_sparse:
        return value
    if place is None:
        require_outside_recording(value.device)
        return value
    local(place).copy_(local(value))
    return place
