"""``torch.compile`` with changes to the graph that make the methods of this package faster.

    >>> import torch
    >>> from deltasam.speed.compiling import compiled
    >>> model = torch.nn.Linear(4, 3)
    >>> fast = compiled(model)  # nothing is compiled before the first forward

It adds three things to the compiler's defaults:

- Under autocast, layers that read the same input become one product (``_merge.py``).
- Under autocast, the products that give the gradients of weights return float32 (``_gradients.py``).
- Attention in float32 on a GPU is written out (``_attention.py``).

All of them compute the same function as before, rounded less or differently. The gradients of merged layers are views
of one tensor: to keep or save one alone, clone it. Measured with torch 2.11; torch 2.6 ignores the changes to the
graph.

Inductor's ``coordinate_descent_tuning`` also tunes the sizes of the kernels. It made steps 1 % faster and
compiling more than twice as long (``benchmarks/compile_time.py``), so it is off.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch

from deltasam._torch import inductor_settings

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compiled"]


def compiled(model: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Any:
    """The model through ``torch.compile``, with the changes above.

    The first forward with a new shape compiles: a minute or more for a large model. Use few shapes
    (:class:`deltasam.speed.capture.PadToBuckets`), and record the compiled model with
    :class:`deltasam.speed.capture.Captured`.

    Args:
        model: Any module that ``torch.compile`` accepts. It is not changed. Save the ``state_dict`` of this model: in
            that of the compiled one every name has a prefix.
        dynamic: As in ``torch.compile``.
        fullgraph: As in ``torch.compile``.
        options: Further settings of Inductor, the compiler behind ``torch.compile``; for a training of hours,
            ``coordinate_descent_tuning=True``. Your own graph passes replace these: ``pre_grad_custom_pass=None``
            disables merged layers and written-out attention, ``post_grad_custom_post_pass=None`` disables float32
            products.

    Raises:
        ValueError: Inductor has no such setting.

    Returns:
        The compiled module, which shares its parameters with the model.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> fast = compiled(model, max_autotune=True)  # then method.backward(fast, batch, objective)
        >>> fast.weight is model.weight
        True
        >>> compiled(model, max_autotne=True)
        Traceback (most recent call last):
        ...
        ValueError: max_autotne=True: Inductor has no such setting; did you mean max_autotune, ...
    """
    from deltasam.speed.compiling._passes import PASSES

    for name, value in options.items():
        if name not in (known := inductor_settings()):
            close = ", ".join(difflib.get_close_matches(name, known, n=3))
            hint = f"did you mean {close}?" if close else "see torch._inductor.list_options()"
            raise ValueError(f"{name}={value!r}: Inductor has no such setting; {hint}")
    return torch.compile(model, dynamic=dynamic, fullgraph=fullgraph, options={**PASSES, **options})
