"""Low precision: the precision in which weights are used, and how much of a move arrives there."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltasam._torch import fsdp_gathers_as, output_dtype, parameters_of
from deltasam.parallel.shards import is_shard, local, sharded_modules, total
from deltasam.step.float32 import rounded
from deltasam.step.gradients import graph_of
from deltasam.step.moving import Moved
from deltasam.step.norms import dense
from deltasam.step.rounding import STORED, Grid, nearest


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disables the user's autocast around ``method.backward``, for the backward pass."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def gathered_as(model: nn.Module) -> torch.dtype | None:
    """The dtype to which FSDP casts the weights when it gathers them; None if it does not cast them."""
    return next((dtype for dtype in map(fsdp_gathers_as, sharded_modules(model)) if dtype is not None), None)


def casts_inside(model: nn.Module) -> bool:
    """Whether autocast decorates the forward of the model, as by Accelerate: code around it cannot switch it off."""
    forward: Any = model.forward
    while forward is not None:
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                region = cell.cell_contents
                if isinstance(region, torch.autocast):
                    with region:
                        return torch.is_autocast_enabled(region.device)
        forward = getattr(forward, "__wrapped__", None)
    return False


# -- the precision in which weights are used --------------------------------------------------------------------------

# By model, by surroundings (autocast, TF32, ...) and by the id of the parameter: the grid, None for float32.
_Known = dict[tuple[Hashable, ...], dict[int, Grid | None]]
_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

_dtype = attrgetter("dtype")
_KEEPS_VALUES = {
    "Alias", "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze",
    "T", "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
# Graph nodes of products, and the operands that are rounded to TF32. A bias is added in float32.
_PRODUCTS = {"Addmm": (1, 2), "Baddbmm": (1, 2), "Bmm": (0, 1), "Linear": (0, 1), "Mm": (0, 1), "Mv": (0, 1)}
_CONVOLUTIONS = {"Convolution": (1,), "CudnnConvolution": (1,)}


def note_grids(
    model: nn.Module, objective: Any, losses: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Finds in the graph of the losses the precision in which parameters are used, for :func:`grids_of`.

    If a weight is cast (by autocast, around the model or inside it), there is a cast between it and the losses. The
    graph, which may have been freed, is searched once per parameter that has a gradient, and again if the objective,
    autocast or TF32 changes. If a parameter is not visible in the graph (compiled models, shards), it is assumed to be
    cast if autocast casts for its type of layer.
    """
    around = _surroundings(model, objective, losses.device)
    known = _known.get(model, {}).get(around)
    if known is None:
        known = _known.setdefault(model, {}).setdefault(around, {})
    if all(map(known.__contains__, map(id, params))) or torch.float32 not in map(_dtype, params):
        return
    taking_part = (p for p, grad in zip(params, grads, strict=True) if grad is not None)
    new = [p for p in taking_part if id(p) not in known and p.dtype is torch.float32]
    if new:
        found = _found_in(losses, around)
        known.update((id(p), found[id(p)] if id(p) in found else _by_module(p, model, around)) for p in new)


def grids_of(model: nn.Module, objective: Any, params: Sequence[Tensor], device: torch.device) -> list[Grid | None]:
    """The grids of these parameters; None if unknown, for float32, or for the dtype in which they are stored."""
    known = _known.get(model, {}).get(_surroundings(model, objective, device), {})
    return list(map(known.get, map(id, params)))


def _surroundings(model: nn.Module, objective: Any, device: torch.device) -> tuple[Hashable, ...]:
    """Everything that the precision of the weights depends on: autocast, TF32, the objective's code, the forward.

    Accelerate replaces the forward by one with autocast. An objective may be a new function in every step, with the
    same code.
    """
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    tf32 = kind == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    code: Any = getattr(objective, "__code__", type(objective))
    return cast, rounded(device) if tf32 and cast is None else frozenset(), code, id(vars(model).get("forward"))


def _found_in(losses: Tensor, around: tuple[Hashable, ...]) -> dict[int, Grid | None]:
    """The grid of every parameter that is visible in a graph, by id. A cast takes precedence over TF32."""
    kinds: Any = around[1]
    products = {**(_PRODUCTS if "matmul" in kinds else {}), **(_CONVOLUTIONS if "conv" in kinds else {})}
    found: dict[int, Grid | None] = {}
    hidden: set[int] = set()
    for node in graph_of(losses):
        name = _operation(node)
        if hasattr(node, "variable"):
            found.setdefault(id(node.variable), None)
        elif name.startswith("CompiledFunction"):  # its inside is not visible in the graph
            hidden.update(id(parent.variable) for parent, _ in node.next_functions if hasattr(parent, "variable"))
        elif name == "ToCopy":
            p, grid = _parameter_under(node, 0), STORED.get(output_dtype(node))  # type: ignore[arg-type]
            if p is not None and grid is not None:
                found[id(p)] = grid
        else:
            for k in products.get(name, ()):
                p = _parameter_under(node, k)
                if p is not None and found.get(id(p)) is None:
                    found[id(p)] = "tf32"
    return {key: grid for key, grid in found.items() if key not in hidden}


def _operation(node: Any) -> str:
    # "Addmm" for "AddmmBackward0"
    return re.sub(r"Backward\d*$", "", str(node.name()))


def _parameter_under(node: Any, operand: int) -> Tensor | None:
    """The parameter whose unchanged values, perhaps reshaped or sliced, are an operand of this node, or None."""
    under = node.next_functions[operand][0]
    while under is not None and _operation(under) in _KEEPS_VALUES:
        under = under.next_functions[0][0]
    return getattr(under, "variable", None)


def _by_module(p: Tensor, model: nn.Module, around: tuple[Hashable, ...]) -> Grid | None:
    """The grid of a parameter that is not visible in the graph, by the type of its layer."""
    gathered = gathered_as(model) if is_shard(p) else None
    cast, kinds = around[:2]
    if gathered is not None:
        return STORED.get(gathered)
    owners = [module for module in model.modules() if any(own is p for own in parameters_of(module).values())]
    if all(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or "norm" in type(m).__name__.lower() for m in owners):
        return None
    if cast is not None:
        return STORED.get(cast)  # type: ignore[call-overload, no-any-return]
    return "tf32" if kinds and p.ndim > 1 else None


# -- how much of a move arrives ---------------------------------------------------------------------------------------

_is_measured = False


@contextmanager
def measured_arrival() -> Iterator[None]:
    r"""Steps inside measure how much of their perturbation arrives, as ``step.arrived``.

    .. math:: \text{arrived} = \frac{\langle \tilde w' - \tilde w, \epsilon \rangle}{\lVert \epsilon \rVert^2}

    with the intended perturbation :math:`\epsilon`, and the weights as the passes use them, :math:`\tilde w` at w and
    :math:`\tilde w'` at w + eps. It is 1 if all of the perturbation arrives.

    Cost: a copy of the perturbation during the measurement, and some sweeps over the weights.

    Example:
        >>> from deltasam import SAM
        >>> model, objective = nn.Linear(2, 1), lambda model, x: model(x).squeeze(-1) ** 2
        >>> with measured_arrival():
        ...     step = SAM(rho=0.05).backward(model, torch.ones(4, 2), objective)
        >>> round(float(step.arrived), 3)
        1.0
    """
    global _is_measured  # noqa: PLW0603
    before, _is_measured = _is_measured, True
    try:
        yield
    finally:
        _is_measured = before


def is_measured() -> bool:
    """Whether steps measure how much of their perturbation arrives."""
    return _is_measured


@torch.no_grad()
def arrived(
    moved: Moved, params: Sequence[Tensor], direction: Sequence[Tensor | None], step: Tensor, grids: Sequence[Any]
) -> Tensor:
    """The share of the move ``step * direction`` that arrived where the weights are used; NaN if nothing moved."""
    meant = {id(p): (d, grid) for p, d, grid in zip(params, direction, grids, strict=True) if d is not None}
    shares, squares = [], []
    for p, w in moved.pairs():
        d, grid = meant[id(p)]
        d = local(d)
        eps = step.to(w.device).float() * dense(d).float()
        ends = [local(p.data).float(), w.float()] if grid is None else [nearest(t, grid) for t in (local(p.data), w)]
        shares.append((((ends[0] - ends[1]) * eps).sum(), p))
        squares.append((eps.square().sum(), p))
    return total(shares) / total(squares) if shares else torch.full_like(step, torch.nan)
