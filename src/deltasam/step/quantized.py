"""Linear layers with a quantized weight (bitsandbytes, torchao, GPTQ): no matrix to differentiate by, or to move.

Their weight is packed into integers, or is a tensor subclass with operations of its own, or is not a parameter at all.
A stand-in, an empty parameter of the matrix's shape, names it in a selection. Methods that add to the output of layers
can perturb it: the per-instance engine, and auxiliary adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from deltasam.parallel.shards import is_shard

_STAND_INS: WeakKeyDictionary[nn.Module, nn.Parameter] = WeakKeyDictionary()


def is_quantized(module: nn.Module) -> bool:
    """Whether a module maps ``in_features`` to ``out_features`` without an ordinary matrix as its weight.

    Example:
        >>> is_quantized(nn.Linear(2, 3))
        False
    """
    shape = _shape(module)
    if shape is None or any(True for _ in module.children()):
        return False
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):  # GPTQ: buffers under other names
        return any(True for _ in module.buffers(recurse=False))
    if is_shard(weight):
        return False
    ordinary = type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor
    return not (ordinary and weight.is_floating_point() and tuple(weight.shape) in (shape, shape[::-1]))


def stand_in(module: nn.Module) -> nn.Parameter:
    """The parameter that represents the matrix of a quantized layer, always the same one: a shape without memory."""
    made = _STAND_INS.get(module)
    if made is None:
        shape = _shape(module)
        assert shape is not None
        made = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        made.layer = ref(module)  # type: ignore[attr-defined]
        _STAND_INS[module] = made
    return made


def layer_of(parameter: Tensor) -> nn.Module | None:
    """The quantized layer that a parameter stands for; None for an ordinary parameter."""
    found = getattr(parameter, "layer", None)
    return found() if isinstance(found, ref) else None


def quantized_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Stand-ins for the weights of all quantized layers, by name."""
    return {f"{name}.weight".lstrip("."): stand_in(m) for name, m in model.named_modules() if is_quantized(m)}


def require_ordinary(params: Iterable[Tensor], named: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if a parameter stands for a quantized weight, which has no gradient and cannot move."""
    for p in params if _STAND_INS else ():  # in most processes there are none
        if (layer := layer_of(p)) is not None:
            name = next((name for name, other in named.items() if other is p), "?")
            raise ValueError(
                f"params selects {name!r}, whose layer ({type(layer).__name__}) is quantized: such a weight has no "
                "gradient and cannot be moved. PerInstanceSAM and BiLoRA need neither (params='base'); for other "
                "methods choose params='trained' or 'adapters', or load the base in bfloat16"
            )


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """``(out, in)``, under the names that libraries use (AQLM, GPTQ: infeatures)."""
    sizes = [
        next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)
        for names in (("out_features", "outfeatures"), ("in_features", "infeatures"))
    ]
    return None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1])
