"""``torch.compile`` with what was measured to be fastest under the methods of this package.

    >>> import torch
    >>> from deltasam.speed.compiling import compiled
    >>> model = torch.nn.Linear(4, 3)
    >>> fast = compiled(model)  # nothing is compiled before the first forward

Four things are added to the compiler's defaults: it tries out the sizes of its kernels
(``coordinate_descent_tuning``); under autocast layers that read the same input become one product
(:func:`~deltasam.speed.compiling._merge.merge_layers`) and gradients of weights leave their product in float32
(:func:`~deltasam.speed.compiling._gradients.keep_float32`); and attention in float32 on a GPU is written out
(:func:`~deltasam.speed.compiling._attention.write_out_attention`). All of them are the same function as before, rounded
less or differently. The gradients of merged layers are parts of one tensor: to keep or save one alone, clone it.
Measured with torch 2.11; torch 2.6 leaves the changes to the graph out.
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
    """The model through ``torch.compile``, with the settings above.

    The first forwards compile, again when a shape is new: a minute and more for a large model. Keep shapes few
    (:class:`deltasam.speed.capture.PadToBuckets`), and record what comes out with :class:`deltasam.speed.capture.Captured`.

    Args:
        model: Any module that ``torch.compile`` takes. It is not changed; save its own ``state_dict``, for in that of
            the compiled one every name has a prefix.
        dynamic: As ``torch.compile`` has it.
        fullgraph: As ``torch.compile`` has it.
        options: Further settings of Inductor, the compiler behind ``torch.compile``. Passes of your own take the place
            of these: ``pre_grad_custom_pass=None`` is without merged layers and written-out attention,
            ``post_grad_custom_post_pass=None`` without float32 products.

    Returns:
        The compiled module, which shares its parameters with the model.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> fast = compiled(model, max_autotune=True)  # in the place of model: method.backward(fast, batch, objective)
        >>> fast.weight is model.weight
        True
        >>> compiled(model, max_autotne=True)
        Traceback (most recent call last):
        ...
        ValueError: max_autotne=True: Inductor has no such setting; near it are max_autotune, ...
    """
    from deltasam.speed.compiling._passes import PASSES

    for name, value in options.items():
        if name not in (known := inductor_settings()):
            close = ", ".join(difflib.get_close_matches(name, known, n=3))
            hint = f"; near it are {close}" if close else ""
            raise ValueError(f"{name}={value!r}: Inductor has no such setting{hint}; torch._inductor.list_options()")
    settings = {"coordinate_descent_tuning": True, **PASSES, **options}
    return torch.compile(model, dynamic=dynamic, fullgraph=fullgraph, options=settings)
