"""Random perturbation: noise on the weights, in proportion to their rows (Flat-LoRA) or of a fixed norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from deltasam.methods._base import Method
from deltasam.methods._fields import choice, radius, random_seed
from deltasam.methods._step import Step, make_step
from deltasam.parallel.shards import is_shard, local
from deltasam.step.auxiliary import is_transposed
from deltasam.step.checks import require_real, shown
from deltasam.step.directions import random_direction
from deltasam.step.fused.noise import Noise, is_ready, supports
from deltasam.step.norms import global_norm
from deltasam.step.passes import Passes
from deltasam.step.precision import is_measured
from deltasam.step.radius import Fixed, Radius, Rho, Scheduled
from deltasam.step.randomness import Seed, seeded_generator

Per = Literal["row", "all"]

_KERNEL = 2**33  # separates the seed of the kernel from those of drawn directions


@dataclass(frozen=True, kw_only=True)
class RandomPerturbation(Method):
    r"""The gradient at randomly perturbed weights: noise instead of an adversary, at the cost of plain training.

    .. math:: \text{gradient} = \nabla \tfrac1N \textstyle\sum_i l_i(w + \epsilon), \qquad
              \epsilon_{jk} = \rho\, \frac{\lVert W_{j\cdot} \rVert_2}{\sqrt n}\, z_{jk}, \qquad z \sim N(0, I)

    for row j of a matrix with n columns: the noise on a row has :math:`\rho` times the norm of the row (root mean
    square). A row is a neuron of a linear layer, a filter of a convolution, a vector of an embedding; vectors (biases,
    norms) are one row. With ``per="all"`` the perturbation is :math:`\rho z / \lVert z \rVert_2` over all selected
    parameters: as large as SAM's and without its direction, which makes it the control for the question whether the
    direction matters.

    Every step draws other noise, from the seed and the number of the step: a resumed run continues exactly, and all
    processes draw the same. Nothing but one copy of the perturbed parameters is kept during the pass.

    With LoRA use ``params="base"``: the noise is on the frozen matrices, which need no gradient. This is Flat-LoRA,
    with two differences. It scales by the rows of the merged matrix :math:`W + s B A`, this class by those of W, which
    differ by the size of the update. Its noise grows from zero to rho during training, along
    :math:`(1 - \cos(\pi t / T)) / 2`: ``rho=Scheduled(0.05, warmup=1.0, ramp="cosine")``.

    Cost: 1 forward, 1 backward; one extra copy of the perturbed parameters, a second one briefly before the pass. On a
    GPU with Triton, noise per row is drawn while it is added, which takes one pass through memory and no second copy.
    The norms of the rows take another pass. No pass is made at w: ``step.losses`` and ``step.perturbed_losses`` are
    both those at the perturbed weights.

    Attributes:
        rho: Size of the noise: relative to each row, or with ``per="all"`` its norm; 0 is plain training. Flat-LoRA
            uses 0.05 for the merged matrices.
        per: ``"row"`` or ``"all"``.
        seed: Seed of the noise.

    References:
        Li et al., Flat-LoRA: Low-Rank Adaptation over a Flat Loss Landscape, ICML 2025 (arXiv 2409.14396).

    Relations:
        :class:`SAM` of the same radius is ``per="all"`` along the gradient.

    Example:
        >>> model, objective = torch.nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> method = RandomPerturbation(rho=0.05)
        >>> first, second = (method.backward(model, torch.ones(4, 2), objective) for _ in range(2))
        >>> first.forwards, first.backwards, bool(first.loss == second.loss)  # the noise differs
        (1, 1, False)
    """

    rho: Rho = radius(0.05)
    per: Per = choice("row", Per)
    seed: int = random_seed()
    cost = "1/1"
    follows_gradient = False
    uses_direction_only = True  # the only pass is the last one: what clips it clips the final gradient

    _has_run: ClassVar[bool] = False  # of this object

    def __post_init__(self) -> None:
        """Also checks that noise in proportion to the rows has a plain radius."""
        super().__post_init__()
        rule = self.rho.rho if isinstance(self.rho, Scheduled) else self.rho
        if self.per == "row" and isinstance(rule, Radius) and not isinstance(rule, Fixed):
            raise ValueError(
                f"rho={shown(self.rho)} with per='row': the noise is relative to every row already, so rho must be a "
                "number, or Scheduled(number, ...); per='all' takes every rule that needs no gradient"
            )

    def capture_key(self) -> bool:
        """The first step differs: the precision in which the weights are used is found in it, and rounded to later."""
        return self._has_run

    def _needs_whole(self) -> bool:
        return False  # the noise does not depend on the batch: each process draws that of its shards

    def _step(self, passes: Passes) -> Step:
        params = list(passes.params.values())
        require_real(params, passes.params)
        direction: list[Tensor | Noise]
        if self.per == "row":
            wide = any(p.dtype is torch.float64 for p in params)
            norm = torch.ones((), device=passes.device, dtype=torch.float64 if wide else torch.float32)
            direction = _noise_by_rows(params, passes.inner, passes.device, self.step_seed)
        else:
            drawn = random_direction(params, self.step_seed)
            norm = global_norm(drawn).to(passes.device)
            direction = [*drawn]
            del drawn
        with passes.ascend(direction, self.radius, norm=norm) as ascent:
            losses = passes.accumulate(keep_side_effects=True)
        object.__setattr__(self, "_has_run", True)
        return replace(make_step(passes, losses, perturbed=losses), arrived=ascent.arrived, radius=ascent.radius)


@torch.no_grad()
def _noise_by_rows(
    params: list[nn.Parameter], model: nn.Module, device: torch.device, seed: Seed
) -> list[Tensor | Noise]:
    """Noise in proportion to the rows: left to the kernel where that supports it, else drawn."""
    transposed = {id(module.weight) for module in model.modules() if is_transposed(module)}
    dims = [1 if id(p) in transposed else 0 for p in params]
    scales = [row_scales(p, dim) for p, dim in zip(params, dims, strict=True)]
    left = [k for k, p in enumerate(params) if p.device == device and supports(p.data)]
    # To measure what arrives, the noise itself is needed. A step of float64 has float64 numbers.
    if not is_ready(device) or is_measured() or any(p.dtype is torch.float64 for p in params):
        left = []
    noise: dict[int, Tensor | Noise] = {}
    if left:
        generator = seeded_generator(device, seed.child(_KERNEL))
        number = torch.randint(2**62, (), generator=generator, device=device)
        for k in left:
            is_one = scales[k].numel() == 1
            columns = params[k].numel() if is_one else params[k].numel() // params[k].shape[0]
            noise[k] = Noise(scales[k].flatten(), columns, bool(dims[k]) and not is_one, number)
    rest = [k for k in range(len(params)) if k not in noise]
    for k, z in zip(rest, random_direction([params[k] for k in rest], seed), strict=True):
        local(z).mul_(scales[k])
        noise[k] = z
    return [noise[k] for k in range(len(params))]


def row_scales(p: Tensor, dim: int = 0) -> Tensor:
    """The root mean square of each slice along a dimension, to be multiplied with the tensor; of a vector, one number.

    Example:
        >>> row_scales(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).squeeze()
        tensor([3.5355, 0.0000])
    """
    others = [d for d in range(p.ndim) if d != dim or p.ndim < 2]
    count = 1
    for d in others:
        count *= p.shape[d]
    wide = torch.promote_types(p.dtype, torch.float32)
    own = is_shard(p) and 0 not in others  # FSDP divides along the first dimension: the rows here are whole
    values = local(p) if own else p.detach()
    if not others or not count:
        norms = values.abs().to(wide)  # a scalar, or an empty tensor
    else:
        norms = torch.linalg.vector_norm(values, dim=others, keepdim=True, dtype=wide)
    whole: Tensor = norms.full_tensor() if is_shard(norms) else norms  # type: ignore[attr-defined]
    scales: Tensor = whole / max(count, 1) ** 0.5
    return scales
