"""The model with weights rounded to few bits: what is left of it after post-training quantization."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltasam.methods import check_number
from deltasam.step.adapters import adapted_layers, adapter_parameters, innermost

Chosen = Callable[[str, nn.Parameter], bool]
Copy = tuple[nn.Parameter, Tensor, Tensor]  # a parameter, its memory, and what was in it


def rounded(weight: Tensor, bits: int, *, group: int | None = 64, dim: int = -1) -> Tensor:
    r"""Returns the weights rounded to the nearest of :math:`2^\text{bits}` values per group, in their own type.

    The values of a group lie evenly between its minimum and its maximum, which are kept:

    .. math:: \hat w = m + s \operatorname{round}\left(\frac{w - m}{s}\right), \quad
              m = \min w, \quad s = \frac{\max w - \min w}{2^\text{bits} - 1}

    Args:
        weight: The weights.
        bits: Bits per weight.
        group: Number of consecutive weights along ``dim`` with common m and s. The last group may be smaller. None for
            all of them: one m and s for each output channel.
        dim: The dimension along which the groups lie: the inputs of a layer.

    Raises:
        ValueError: The weights are not of floating point.

    Example:
        >>> rounded(torch.tensor([0.0, 0.2, 0.7, 1.0]), bits=1)
        tensor([0., 0., 1., 1.])
    """
    check_number("bits", bits, 1, 16, whole=True)
    if not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype}; only floating-point weights can be rounded")
    if not weight.ndim or not weight.numel():
        return weight.detach().clone()
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).movedim(dim, -1)
    group = max(1, wide.shape[-1]) if group is None else group
    check_number("group", group, 1, whole=True)
    parts = []
    for part in wide.split(group * max(1, wide.shape[-1] // group), dim=-1):  # whole groups, then the rest
        grouped = part.unflatten(-1, (-1, min(group, part.shape[-1])))
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        steps = ((grouped - low) / torch.where(step > 0, step, 1)).round_()
        parts.append((low + steps * step).flatten(-2))
    return torch.cat(parts, dim=-1).movedim(-1, dim).to(weight.dtype)


@contextmanager
def quantized(
    model: nn.Module, bits: int, *, group: int | None = 64, params: Chosen | None = None
) -> Iterator[nn.Module]:
    """Rounds the matrices of the linear layers to nearest inside; restores all weights bit for bit afterwards.

    This is the plainest kind of post-training quantization: no calibration data, one scale and offset for ``group``
    consecutive inputs of an output, see :func:`rounded`. The numbers are rounded but stay in their type, so nothing
    becomes faster or smaller. Adapters of PEFT on a rounded matrix are merged first, because it is the merged matrix
    that is stored in few bits; other adapters work as always, disabled ones stay out, merged ones stay merged.
    Embeddings, an output layer that shares their weights or is returned by ``get_output_embeddings()``, biases and
    norms stay, as in the usual quantization of language models. So do experts that are stacked in one parameter, with
    a warning.

    Cost: a copy of the rounded matrices, and of the biases beside those that carry adapters. All parameters keep their
    memory (``data_ptr()``).

    Args:
        model: The model, which is changed in place and yielded.
        bits: Bits per weight.
        group: Number of consecutive inputs with a common scale and offset; None for all inputs of an output channel.
        params: Rounds other parameters: a predicate ``(name, parameter) -> bool`` over all of two dimensions.

    Raises:
        ValueError: There is no matrix to round, or the adapters of one are merged and disabled.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> before = model[0].weight.clone()
        >>> with quantized(model, bits=1, group=8):
        ...     [len(row.unique()) for row in model[0].weight]
        [2, 2, 2, 2]
        >>> torch.equal(model[0].weight, before)
        True
    """
    matrices = _matrices(model, params)
    if not matrices:
        raise ValueError(
            "there is no floating-point matrix of a linear layer to round; a model that is quantized already cannot "
            "be rounded again, and other parameters are selected by params=lambda name, parameter: ..."
        )
    if params is None:
        _warn_about_stacks(model, sum(weight.numel() for weight, _ in matrices))
    chosen = {id(weight) for weight, _ in matrices}
    # Only these are merged: merging and unmerging leaves rounding errors, and an adapter of embeddings would also
    # change an output layer that shares their weights.
    layers: dict[str, Any] = {
        name: layer
        for name, layer in adapted_layers(model).items()
        if any(id(p) in chosen for p in innermost(layer).parameters())
    }
    _refuse_merged_and_disabled(layers)
    # Merging changes biases, too (lora_bias).
    changed = [weight for weight, _ in matrices] + [p for x in layers.values() for p in innermost(x).parameters()]
    with ExitStack() as stack:  # runs all of its callbacks, from the last to the first, even if one fails
        copies = {id(p): (p, p.data, p.detach().clone()) for p in {id(p): p for p in changed}.values()}
        stack.callback(_restore, list(copies.values()))
        with torch.no_grad():
            for layer in layers.values():
                own = [copies[id(p)] for p in innermost(layer).parameters()]
                stack.callback(_unmerge, layer, list(layer.merged_adapters), own)
                if not (layer.merged or layer.disable_adapters):
                    layer.merge()
                    _move(own)
            for weight, dim in matrices:
                weight.copy_(rounded(weight, bits, group=group, dim=dim))
        yield model


def _warn_about_stacks(model: nn.Module, rounded: int) -> None:
    """Warns if much of the model is in stacks of matrices: models differ in which dimension is that of the inputs."""
    stacks = [
        (f"{prefix}.{name}".lstrip("."), p.numel())
        for prefix, module in model.named_modules()
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 3 and p.is_floating_point()
    ]
    count = sum(size for _, size in stacks)
    if count > rounded / 10:
        warnings.warn(
            f"{count:,} weights in {len(stacks)} parameters of three dimensions, such as {stacks[0][0]!r}, are not "
            f"rounded; {rounded:,} are. If they are experts of a mixture, the result says little about the model",
            stacklevel=4,  # the `with` statement of the caller
        )


def _refuse_merged_and_disabled(layers: dict[str, Any]) -> None:
    for name, layer in layers.items():
        if layer.merged and layer.disable_adapters:
            raise ValueError(
                f"model: the adapter of {name!r} is merged and disabled, so the next forward pass would subtract it "
                "from the rounded matrix: call model.unmerge_adapter() first"
            )


@torch.no_grad()
def _unmerge(layer: Any, before: list[str], own: list[Copy]) -> None:
    """Unmerges the adapters, unless they were merged ``before``. The values are restored later."""
    if layer.merged and not before:
        layer.unmerge()
        _move(own)
    if list(layer.merged_adapters) != before:  # a forward pass with disabled adapters has unmerged them
        layer.merged_adapters = before


@torch.no_grad()
def _restore(copies: list[Copy]) -> None:
    _move(copies)
    for p, _, values in copies:
        p.copy_(values)


def _move(copies: list[Copy]) -> None:
    """Moves parameters back into their memory: DoRA merges and unmerges into new memory, which CUDA graphs miss."""
    for p, memory, _ in copies:
        if p.data_ptr() != memory.data_ptr():
            memory.copy_(p)
            p.data = memory


def _matrices(model: nn.Module, params: Chosen | None) -> list[tuple[nn.Parameter, int]]:
    """Returns the parameters to round, each once, with the dimension of the layer's inputs."""
    transposed = {id(m.weight) for m in model.modules() if _is_conv1d(m)}
    if params is None:
        kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        output: Any = getattr(model, "get_output_embeddings", None)
        head = None if output is None else output()
        kept |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        kept |= adapter_parameters(model)
        layers = (m for m in model.modules() if isinstance(m, nn.Linear) or _is_conv1d(m))
        found = [m.weight for m in layers if id(m.weight) not in kept]
    else:
        found = [p for name, p in model.named_parameters() if params(name, p)]
    unique = {id(p): p for p in found if isinstance(p, nn.Parameter) and p.dim() == 2 and p.is_floating_point()}
    return [(p, 0 if key in transposed else 1) for key, p in unique.items()]


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter)
