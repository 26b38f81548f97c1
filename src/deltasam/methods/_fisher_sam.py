"""Fisher SAM: perturbs only the entries with the largest Fisher information."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.methods._buffers import fitted
from deltasam.methods._fields import number, radius
from deltasam.methods._step import Step, make_step
from deltasam.parallel.refusals import require_whole
from deltasam.step.passes import Passes, direction_norms
from deltasam.step.radius import Rho

Kind = Literal["due", "again", "keep"]


@dataclass(frozen=True, kw_only=True)
class FisherSAM(Method):
    r"""FSAM: SAM's perturbation on the entries with the largest (diagonal, empirical) Fisher information.

    .. math:: \epsilon^* = \rho \, m \odot \nabla l(w) / \lVert \nabla l(w) \rVert_2, \qquad
              m = \text{top } \kappa \text{ of all entries by } (\nabla l(w))^2

    The mask is computed from the current gradient every ``refresh`` steps and kept in between (one byte per entry, in
    :meth:`state_dict`). If that gradient is not finite, the next step computes it again.

    Cost: 2 forwards, 2 backwards; one extra copy of the parameters and a quarter of one for the mask; on the steps
    that renew the mask, another copy of the gradient.

    Attributes:
        rho: Radius of the full perturbation, of which the mask keeps a part.
        keep: kappa, the share of the entries that are perturbed.
        refresh: Number of steps between two computations of the mask.

    References:
        Zhong et al., Improving Sharpness-Aware Minimization with Fisher Mask for Better Generalization on Language
        Models, Findings of EMNLP 2022.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = FisherSAM(keep=0.5)
        >>> step = method.backward(model, torch.ones(4, 2), objective)
        >>> sum(int(mask.sum()) for mask in method.state["mask"].values())
        1
    """

    rho: Rho = radius()
    keep: float = number(0.1, high=1, open_low=True)
    refresh: int = number(100, low=1, whole=True)
    buffers = ("mask", "mask_good", "mask_heard")
    uses_direction_only = True
    plain_ascent = False

    _decided: ClassVar[tuple[int, Kind] | None] = None  # of this object: the number of the next step, and its kind

    def capture_key(self) -> Kind:
        """Whether the next step computes masks: if they are due, or again if their gradient may not have been finite.

        Whether it was finite is known on the device, as ``mask_good``; reading it would synchronise. It is copied to
        ``mask_heard`` on the host, which is False until the copy arrives. So a step may compute new masks although
        the old ones are good; the device then keeps the old ones. All parts of a step see the same decision.
        """
        if self._decided is None or self._decided[0] != self.steps:
            is_due = self.steps % self.refresh == 0 or "mask" not in self.state
            is_heard = bool(self.state.get("mask_heard", "mask_good" not in self.state))
            kind: Kind = "due" if is_due else "keep" if is_heard else "again"
            object.__setattr__(self, "_decided", (self.steps, kind))
            return kind
        return self._decided[1]

    def buffer_key(self) -> tuple[tuple[str, Hashable], ...]:
        """Without the flag on the host, which no recorded step uses."""
        return tuple(each for each in super().buffer_key() if each[0] != "mask_heard")

    def count_step(self, step: Step) -> Step:
        """Also sends the host the flag, if the step has computed masks; of a replayed step only this runs."""
        if self.capture_key() != "keep" and "mask_good" in self.state:
            self.state["mask_heard"] = _sent(self.state["mask_good"])
        object.__setattr__(self, "_decided", None)
        return super().count_step(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also decides anew which kind of step comes next."""
        super().load_state_dict(state)
        object.__setattr__(self, "_decided", None)

    def _step(self, passes: Passes) -> Step:
        self.claim_buffers()
        require_whole("FisherSAM", list(passes.params.values()))
        losses, grads = passes.gradient()
        named = {n: g.to_dense() for n, g in zip(passes.params, grads, strict=True) if g is not None}
        del grads
        norms = direction_norms([named.get(n) for n in passes.params]).to(passes.device)
        norm = torch.linalg.vector_norm(norms)
        masks = self._masks(named, norm) if named else {}
        used = named.keys() & masks.keys()
        # Popped one by one, so that no second copy of the gradient is held.
        direction = [_kept(named.pop(n), masks[n]) if n in used else None for n in passes.params]
        with passes.ascend(direction, self.radius, norm=norm, norms=norms) as ascent:
            perturbed = passes.accumulate()
        return make_step(passes, losses, perturbed=perturbed, ascent=ascent)

    @torch.no_grad()
    def _masks(self, gradient: dict[str, Tensor], norm: Tensor) -> dict[str, Tensor]:
        """The masks of this step, computed anew, in their memory, if :meth:`capture_key` says so."""
        masks = self.kept("mask", gradient, torch.bool) or {}
        kind = self.capture_key()
        if kind == "keep":
            return masks
        good = self.table("mask_good", (), device=norm.device, dtype=torch.bool)
        # A mask that has failed is replaced by the next good one; a good one stays until it is due.
        replaced, names = torch.isfinite(norm), [*gradient]
        if kind == "again":
            replaced, names = replaced & ~good, [*{**masks, **gradient}]
        fresh = top_entries(gradient, self.keep)
        for name in names:
            mask = masks[name] if name in masks else fitted(None, gradient[name], torch.bool)
            new = fresh.get(name, torch.zeros_like(mask))
            masks[name] = mask.copy_(torch.where(replaced.to(mask.device), new.to(mask.device), mask))
        good.copy_(replaced if kind == "due" else good | replaced)
        masks = self.state["mask"] = {name: masks[name] for name in names}
        return masks


def _sent(flag: Tensor) -> Tensor:
    """A copy of the flag on the host, False until the copy has arrived."""
    # Pinned: a copy into pageable memory would synchronise.
    host = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=flag.is_cuda)
    return host.copy_(flag, non_blocking=True)


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.to(values.device), values, torch.zeros_like(values))


def top_entries(values: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Masks of the entries with the largest magnitude, ``int(share * entries)`` of all together (at least one)."""
    flat = torch.cat([v.abs().flatten().float().to(next(iter(values.values())).device) for v in values.values()])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen.scatter_(0, torch.topk(flat, max(1, int(share * flat.numel())), sorted=False).indices, True)
    parts = torch.split(chosen, [v.numel() for v in values.values()])
    return {name: part.view(v.shape).to(v.device) for (name, v), part in zip(values.items(), parts, strict=True)}
