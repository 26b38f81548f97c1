"""Per-instance SAM: an exact perturbation for every instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltasam.methods._base import Method
from deltasam.methods._fields import choice, number, radius
from deltasam.methods._step import Step, make_step
from deltasam.objectives import Objective
from deltasam.per_instance import (
    Engine,
    InstancesMixedError,
    Recording,
    UncoveredError,
    count_pass,
    one_by_one,
    record,
    refuse_batch_statistics,
    warn_of_loop,
    warn_once,
)
from deltasam.step.batches import batch_size
from deltasam.step.checks import check_losses
from deltasam.step.float32 import rounds_products
from deltasam.step.passes import Ascent, Passes
from deltasam.step.quantized import layer_of
from deltasam.step.radius import Climb, Radius, Rho

Factors = Literal["auto", "exact", "bfloat16"]
Uncovered = Literal["loop", "skip"]


@dataclass(frozen=True, kw_only=True)
class PerInstanceSAM(Method):
    r"""Per-instance SAM, Eq. 2: every instance has its own perturbation of the weights.

    .. math:: \epsilon_i = \rho \, \nabla l_i(w) / \lVert \nabla l_i(w) \rVert_2, \qquad
              \text{gradient} = \tfrac1N \textstyle\sum_i \nabla l_i(w + \epsilon_i)

    The paper considers this infeasible (2N forward and 2N backward passes). It is not: the perturbation of a linear
    layer by one instance has rank T, so the perturbed layer is :math:`W x + c_i D_i^\top (X_i x)` with the inputs X
    and output gradients D of one batched pass, see :mod:`deltasam.per_instance`. The weights are never written.

    With ``group=m``, m neighbours in the batch share a perturbation: exact m-sharpness in one batch, SAM for m = N.

    The perturbed weights need not be trained: with ``params="base"``, adapters are trained under perturbations of the
    frozen matrices that carry them, also of quantized ones, without a gradient or a copy of these matrices.

    With several processes nothing is communicated in the first pass, and the gradient does not depend on their number.

    Cost: 2 forwards, 2 backwards, the first without weight gradients: about SAM's, for texts of any length. Where
    the low rank would cost more (long texts), the gradients of a layer are written out, and the layer multiplies with
    :math:`W + c_i \nabla_W l_i`, which takes as many products as SAM; the form of each layer follows from its shapes.
    In bfloat16 and TF32 these matrices are rounded stochastically, as the moved weights of SAM are. Memory, beyond
    that of SAM: the inputs and output gradients of the layers between the two passes, and by default at most a quarter
    more, see ``max_extra_memory``. With the loop engine: 2N + 1 forwards, 2N backwards,
    each over one instance, or, with dropout, over the whole batch.

    Attributes:
        rho: Radius. This adversary is much stronger than SAM's, so the best radius is smaller: 0.005 on four of four
            GLUE tasks, where SAM's was 0.01 or 0.02. With SAM's 0.05 the model hardly learns.
        group: Number of instances that share a perturbation.
        engine: ``"low-rank"``; ``"loop"``: one group after the other, any model, slow; ``"auto"``: low-rank where it
            covers the model.
        uncovered: What to do about a parameter that no rule of the low-rank engine covers: ``"loop"``: loop over the
            instances (with ``engine="low-rank"``: raise); ``"skip"``: leave it unperturbed. Both warn once.
        factors: How the low-rank engine keeps the output gradients D of float32 layers for the second pass:
            ``"exact"``: as they were computed; ``"bfloat16"``: in half the memory, which leaves two to three digits of
            the direction of the perturbation and rounds nothing else; ``"auto"``: ``"bfloat16"`` on a GPU with TF32,
            which rounds products anyway, for layers with more outputs than inputs, else ``"exact"``.
        at_once: The most instances that pass through the model together; None for the whole batch. The result is the
            same, and both passes over one part hold the activations and factors of this part only. Tensors with one
            row per instance are cut; what the instances share needs a first dimension of 1. With shards each process
            accumulates whole gradients until its last part: the processes may have different numbers of parts.
        max_extra_memory: Bytes that the gradients of the layers' matrices may take between the two passes. The fastest
            forms of the layers that fit are taken; if even the smallest do not fit, those are, and a warning names the
            ``at_once`` that would fit. None: 1.25 times what low rank would keep, the inputs and output gradients of
            the layers, and frozen matrices in their smallest form. A large number: the fastest forms, whatever they
            take.

    Raises:
        InstancesMixedError: The loss of an instance depends on the others (BatchNorm in training, in-batch negatives).

    References:
        Zhou et al., Sharpness-Aware Minimization with Dynamic Reweighting, Findings of EMNLP 2022, Eq. 2.

    Relations:
        :class:`SAM` is ``group=N``; :class:`DeltaSAM` approximates ``group=1``.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> step = PerInstanceSAM(rho=0.02).backward(model, torch.rand(4, 2), objective)
        >>> step.forwards, step.backwards, bool((step.perturbed_losses > step.losses).all())
        (2, 2, True)
    """

    rho: Rho = radius(0.005)
    group: int = number(1, low=1, whole=True)
    engine: Engine = choice("auto", Engine)
    uncovered: Uncovered = choice("loop", Uncovered)
    # "exact" was the first default: a run that recorded it keeps its name. It differs from "auto" in rounding only.
    factors: Factors = choice("auto", Factors, metadata={"later": ("auto", "exact")})
    at_once: int | None = number(None, low=1, whole=True, optional=True, metadata={"later": (None,)})
    max_extra_memory: int | None = number(None, low=0, whole=True, optional=True, metadata={"later": (None,)})
    perturbs = "instances"

    def _step(self, passes: Passes) -> Step:
        passes.scope = "local"  # a perturbation belongs to one instance: nothing to communicate
        if getattr(passes.objective, "separable", True) is False:
            raise InstancesMixedError(
                f"{type(passes.objective).__name__} {getattr(passes.objective, 'mixing', Objective.mixing)}, so a "
                "perturbation per instance is not defined; use SAM or DeltaSAM"
            )
        if self.engine == "loop":  # the low-rank engine checks this itself
            refuse_batch_statistics(passes.inner)
        if self.at_once is not None:  # groups stay together
            passes = passes.in_parts(max(self.at_once // self.group, 1) * self.group)
        parts = [self._part(part) for part in passes.parts(one_exchange=self.at_once is not None)]
        losses, perturbed, norms, radii = (list(values) for values in zip(*parts, strict=True))
        reached = torch.cat(radii)
        whole = torch.cat(passes.as_in_the_whole(norms, [part.shape[0] for part in losses]))
        unscaled = whole / passes.scaled(torch.ones_like(whole))
        ascent = Ascent(norm=unscaled.mean(), skipped=(reached == 0).all(), radius=reached.mean())
        return make_step(passes, passes.joined(losses), perturbed=passes.joined(perturbed), ascent=ascent)

    def _part(self, part: Passes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Losses at w and perturbed, norms of the groups' mean gradients and radii of one micro-batch."""
        rule = self.radius
        recording = None if self.engine == "loop" else self._record(part, separate=rule.is_per_parameter())
        if recording is None:
            return self._loop(part, rule)
        members = torch.full_like(recording.norms, self.group)
        members[-1:] -= members.shape[0] * self.group - recording.losses.shape[0]  # the last group may be smaller
        params = list(part.params.values())
        climb = Climb(
            norm=recording.norms,
            model=part.inner,
            names=list(part.params),
            params=params,
            scale=lambda: part.scaled(members) / part.as_whole,
            norm_of_each=lambda: recording.norms_of(params),
            loss=lambda: recording.mean_losses(members) * part.as_whole,
        )
        sizes = rule.sizes(climb)
        scaled = recording.times(params, sizes.steps) if sizes.per_parameter else recording
        with scaled.perturbed(torch.ones_like(sizes.radius) if sizes.per_parameter else sizes.steps):
            perturbed = part.accumulate()
        return recording.losses, perturbed, recording.norms / members, sizes.radius

    def _record(self, part: Passes, *, separate: bool) -> Recording | None:
        """The pass at w, without the parameters to skip; None if the loop engine must take over.

        With ``separate``, the gradients of weights and biases can be scaled separately.
        """
        size = batch_size(part.batches[0]) or None  # the objective raises for an empty batch
        runs = 0

        def run() -> Tensor:
            nonlocal runs
            if runs:
                part.rewind()
            runs += 1
            losses = part.evaluate()
            check_losses(losses, graph=True)
            return losses

        params: Mapping[str, Tensor] = part.params
        while True:
            sizes = list(part.sizes)
            try:
                with part.one_pass(keep_side_effects=True), part.ranks.shards_held(), count_pass(part):
                    found = record(
                        part.inner,
                        run,
                        params,
                        size=size,
                        group=self.group,
                        scale=part.scaled,
                        objective=part.objective,
                        separate=separate,
                        most=self.max_extra_memory,
                    )
                break
            except UncoveredError as why:
                part.rewind()
                part.sizes = sizes  # those of the failed pass do not count
                params = {name: p for name, p in params.items() if name not in why.parameters}
                if self.uncovered != "skip" or not params:
                    # The loop moves weights, which it cannot do with quantized ones.
                    if self.engine == "low-rank" or any(layer_of(p) is not None for p in part.params.values()):
                        raise
                    warn_of_loop(part, why)
                    return None
                warn_once(part.inner, f"{why}. It is left unperturbed (uncovered='skip')")
        self._check_memory(part, found)
        found = found.for_one_pass()
        if self.factors == "auto":
            return found.rounded(widening=True) if rounds_products(found.losses.device) else found
        return found.rounded() if self.factors == "bfloat16" else found

    def _check_memory(self, part: Passes, found: Recording) -> None:
        """Warns once if the smallest forms of the layers take more than ``max_extra_memory``."""
        most, size = self.max_extra_memory, found.losses.shape[0]
        if most is not None and (kept := found.gradients.kept_of_matrices()) > most:
            fits = max(self.group, int(size * most / kept) // self.group * self.group)
            warn_once(
                part.inner,
                f"max_extra_memory={most}, but the gradients of {size} instances take {kept} bytes in their smallest "
                f"form; pass at_once={fits}",
            )

    def _loop(self, part: Passes, rule: Radius) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One group after the other."""
        losses, groups = one_by_one(part, self.group, keep_side_effects=True)
        perturbed, norms, radii = [], [], []
        for k, group in enumerate(groups):
            _, grads = group.gradient(keep_side_effects=False)
            # One exchange of gradients at the last group, however many groups other processes have.
            with part.ranks.no_sync(k < len(groups) - 1, shards=True), group.ascend(grads, rule) as ascent:
                perturbed.append(group.accumulate())
            norms.append(part.scaled(ascent.norm) / group.share)
            assert ascent.radius is not None
            radii.append(ascent.radius)
        return losses, torch.cat(perturbed), torch.stack(norms), torch.stack(radii)
