"""Bi-LoRA: a second adapter beside each matrix climbs while the first one descends, in a single pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from deltasam.methods._base import Method
from deltasam.methods._fields import choice, number, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.step.adapter_inputs import without_input_casts
from deltasam.step.auxiliary import Place, added, places_beside, products_norm
from deltasam.step.passes import Ascent, Passes
from deltasam.step.radius import Rho
from deltasam.step.selection import Selection, select

Climb = Literal["adam", "gradient"]

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # the defaults of torch.optim.Adam


@dataclass(frozen=True, kw_only=True)
class BiLoRA(Method):
    r"""Bi-LoRA: the gradient at W + B A, where B and A have followed the gradient upwards in earlier steps.

    .. math:: \text{gradient} &= \nabla \tfrac1N \textstyle\sum_i l_i(W_1 + B A) \\
              B &\leftarrow B + \eta\, \nabla_B, \qquad A \leftarrow A + \eta\, \nabla_A \\
              (B, A) &\leftarrow \sqrt{\rho / c}\, (B, A) \quad \text{if } c > \rho, \qquad
              c^2 = \textstyle\sum_j \lVert B_j A_j \rVert_F^2 \text{ over all layers } j

    Here :math:`W_1 = W_0 + s B_1 A_1` is the matrix with its ordinary adapter, which your optimizer trains. The
    auxiliary pair (B, A) beside it is the adversary. One backward pass serves both. The pair is state of the method,
    not a part of the model: the optimizer, the ``state_dict`` of the model and ``save_pretrained`` never see it. It is
    gone when you stop using the method. It is added to the output of the layer, so the matrix may be frozen, in
    bfloat16 or quantized, and is never written to.

    From the paper: the objective (Eq. 8), the simultaneous ascent (Eq. 9) from the values before the step, the common
    clipping (Eq. 10), and the defaults of ``rho``, ``lr`` and ``rank``. Ours: the paper omits the scaling of the
    auxiliary pair, which is 1 here, so that rho is the norm of the perturbation itself. It does not state how the
    auxiliary pair starts; here A is uniform in :math:`\pm 1 / \sqrt{\text{inputs}}` and B is zero, as PEFT starts an
    adapter, so the first step is plain training. Eq. 9 is plain gradient ascent (``climb="gradient"``). The paper does
    not name its optimizer, and uses the learning rate of its LoRA adapters for both pairs; with plain ascent at such a
    rate B A stays orders of magnitude below rho, so the default is Adam, which LoRA is usually trained with. LoRA
    dropout is not applied to the auxiliary pair.

    In bfloat16 the output of a layer and B A x are added with rounding to nearest: of a perturbation of 0.4% of the
    outputs 97% arrived (28 layers of SmolLM2's shape with random weights, rho = 0.05), of a smaller one less.

    A layer with DoRA, rsLoRA or any other adapter of PEFT gets the pair beside its merged matrix. Linear layers,
    ``Conv1D`` (GPT-2) and embeddings can have a pair; other layers are left unperturbed. Without PEFT, ``params`` can
    choose other matrices: with ``params="trained"`` in full fine-tuning every trained matrix has an adversary of low
    rank.

    Cost: 1 forward, 1 backward, each with two thin products more per layer; memory: three times the auxiliary factors
    (once with ``climb="gradient"``), in float32, and their gradients; no copy of the parameters. No pass is made at
    W_1: ``step.losses`` and ``step.perturbed_losses`` are both those at W_1 + B A. ``step.grad_norm`` is the norm of
    the gradient of the auxiliary pairs; where it is zero or not finite, they stay as they are (``step.skipped``).

    With several processes and ``scope="local"`` each has its own adversary, and ``"global"`` averages their gradients.
    Call the method once per optimizer step: with gradient accumulation pass :class:`~deltasam.MicroBatches`, else the
    pair climbs in every micro-batch.

    Attributes:
        rho: Largest norm of the perturbation, over all layers; 0 is plain training. The paper uses 0.05, and 0.1 on
            SuperGLUE and for a model of 14B parameters.
        lr: :math:`\eta`, the learning rate of the auxiliary pairs; the paper takes that of the adapters.
        rank: Rank of the auxiliary pairs, independent of the adapters'.
        climb: How the pairs follow their gradient: ``"adam"``, or ``"gradient"``, Eq. 9 to the letter.
        params: The matrices that get a pair; by default those that carry adapters.
        seed: Seed of the first A.

    Raises:
        ValueError: Nothing that was selected can have a pair; with the default, the model has no adapters.

    References:
        Liu et al., Bi-LoRA: Efficient Sharpness-Aware Minimization for Fine-Tuning Large-Scale Models, ICLR 2026
        (arXiv 2508.19564).

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = BiLoRA(rho=0.05, params="trained")  # no adapters here; with PEFT leave params out
        >>> steps = [method.backward(model, torch.ones(4, 2), objective) for _ in range(30)]
        >>> steps[-1].forwards, steps[-1].backwards, bool(steps[-1].loss > steps[0].loss)
        (1, 1, True)
        >>> a, b = method.factors(model)["weight"]
        >>> bool((b @ a).norm() <= 0.0501)
        True
    """

    rho: Rho = radius(0.05)
    lr: float = number(5e-4)
    rank: int = number(8, low=1, whole=True)
    climb: Climb = choice("adam", Climb)
    params: Selection = field(default="base")
    seed: int = random_seed()
    cost = "1/1"
    perturbs = "layers"
    buffers = ("auxiliary", "mean", "square", "ascents")
    needs_adapters = True
    follows_gradient = False
    uses_direction_only = True  # the only pass is the last one: what clips it clips the final gradient

    def _step(self, passes: Passes) -> Step:
        places = self._places(passes.inner, passes.params)
        wide = any(p.dtype is torch.float64 for p in passes.trainable.values())
        values = self.table(
            "auxiliary",
            (_size(places, self.rank),),
            device=passes.device,
            dtype=torch.float64 if wide else torch.float32,
            start=lambda table: _start(_pairs(table, places, self.rank), self.seed),
        )
        pairs = _pairs(values, places, self.rank)
        before = products_norm(pairs)
        leaves = [(a.detach().requires_grad_(), b.detach().requires_grad_()) for a, b in pairs]
        with without_input_casts(passes.inner), added(places, leaves) as state, passes.perturbed_by(state.off):
            losses = passes.accumulate(keep_side_effects=True)
        with torch.no_grad():
            gradient = _flat_gradient(leaves) / passes.scaled(torch.ones_like(values[0]))
            if self.scope == "global":
                gradient = passes.ranks.mean(gradient)
            norm = torch.linalg.vector_norm(gradient)
            good = torch.isfinite(norm) & (norm > 0)
            move = self._adam(gradient, good) if self.climb == "adam" else gradient
            values.add_(torch.where(good, self.lr * move, 0))
            size = products_norm(pairs)
            rho = self.radius.bound(list(passes.params.values()), list(passes.params), passes.inner)
            values.mul_(torch.where(good & (size > rho), (rho / size).sqrt(), 1).to(values.dtype))
            ascent = Ascent(norm=norm, skipped=~good, radius=before)
        return make_step(passes, losses, perturbed=losses, ascent=ascent)

    def _adam(self, gradient: Tensor, good: Tensor) -> Tensor:
        """Adam's direction, with moments that ignore gradients that are not good."""
        table = partial(self.table, device=gradient.device, dtype=gradient.dtype)
        count = table("ascents", ()).add_(good)  # on the device, so that a captured step can replay
        moments = []
        for name, beta, value in zip(("mean", "square"), _BETAS, (gradient, gradient.square()), strict=True):
            kept = table(name, gradient.shape)
            torch.where(good, torch.lerp(kept, value, 1 - beta), kept, out=kept)
            moments.append(kept / (1 - beta**count))
        return moments[0] / (moments[1].sqrt() + _EPSILON)

    def factors(self, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """The auxiliary pairs (A, B) by the name of their layer; empty before the first step. They share memory."""
        values: Tensor | None = self.state.get("auxiliary")
        if values is None:
            return {}
        places = self._places(model, select(model, self.params))
        self.check_remembered("auxiliary", values, (_size(places, self.rank),))
        pairs = _pairs(values, places, self.rank)
        return {place.name or "weight": pair for place, pair in zip(places, pairs, strict=True)}

    def _places(self, model: nn.Module, params: dict[str, nn.Parameter]) -> list[Place]:
        places = places_beside(model, params)
        if not places:
            raise ValueError(
                f"params={self.params!r} selects no matrix that an auxiliary pair can be added to (linear layers, "
                f"Conv1D, embeddings), e.g. {next(iter(params))!r}: use params='base' with adapters of PEFT, or "
                "select weights of such layers"
            )
        return places


def _size(places: Sequence[Place], rank: int) -> int:
    return sum(rank * (place.inputs + place.outputs) for place in places)


def _pairs(values: Tensor, places: Sequence[Place], rank: int) -> list[tuple[Tensor, Tensor]]:
    """A and B of every layer, as views of one block of memory, which a few kernels can update."""
    shapes = [shape for place in places for shape in place.shapes(rank)]
    parts = torch.split(values, [rows * columns for rows, columns in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return list(zip(views[::2], views[1::2], strict=True))


def _start(pairs: Sequence[tuple[Tensor, Tensor]], seed: int) -> None:
    """Drawn on the CPU: the same on every device and in every process."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for a, b in pairs:
        bound = a.shape[1] ** -0.5
        a.copy_(torch.empty(a.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator))
        b.zero_()


def _flat_gradient(leaves: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradients in the order of the values; zero for a layer that was not called."""
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for pair in leaves for leaf in pair]
    return torch.cat([part.flatten() for part in parts])
