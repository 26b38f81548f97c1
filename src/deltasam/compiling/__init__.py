"""``torch.compile`` with what was measured to be fastest under the methods of this package.

    >>> import torch
    >>> from deltasam.compiling import compiled
    >>> model = compiled(torch.nn.Linear(4, 3))  # nothing is compiled before the first forward
    >>> [name for name, _ in model._orig_mod.named_parameters()]
    ['weight', 'bias']

Four things are added to the compiler's defaults: it tries out the sizes of its kernels
(``coordinate_descent_tuning``); under autocast layers that read the same input become one product
(:func:`~deltasam.compiling._merge.merge_layers`) and gradients of weights leave their product in float32
(:func:`~deltasam.compiling._gradients.keep_float32`); and attention in float32 is written out
(:func:`~deltasam.compiling._attention.write_out_attention`). All of them are the same function as before, rounded
less or differently; weights, gradients and their names stay those of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["compiled"]


def compiled(model: nn.Module, **options: Any) -> Any:
    """The model through ``torch.compile``, with the settings above.

    The first forward of every shape compiles: a minute and more for a large model. Keep shapes few
    (:class:`deltasam.capture.PadToBuckets`), and record what comes out with :class:`deltasam.capture.Captured`.

    Args:
        model: Any module that ``torch.compile`` takes. It is not changed.
        options: Further settings of Inductor, the compiler behind ``torch.compile``, or other values of these ones.

    Returns:
        The compiled module, which shares its parameters with the model.
    """
    from deltasam.compiling._passes import PASSES  # torch's compiler, seconds to import

    return torch.compile(model, options={"coordinate_descent_tuning": True, **PASSES, **options})
