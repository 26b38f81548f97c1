"""Adds a perturbation to the input embeddings of an unmodified model by hooks, except at padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import recomputed_by
from deltasam.objectives.regularisers._find import Embeddings, Side, find_embeddings


@dataclass(frozen=True)
class Site:
    """One call of the embedding layer within a forward pass: where a perturbation can be added.

    Attributes:
        index: The number of the call within the pass (a pair of sentences encoded in two calls has two sites).
        shape: Shape of the embeddings, ``(rows, tokens, hidden)``.
        dtype: At least float32, even if the embeddings are not: a perturbation of 1e-5 is lost in bfloat16.
        device: The device of the embeddings.
        mask: True for real tokens, False for padding, ``(rows, tokens, 1)``; None if no padding is known.
        ids: The input of the layer, usually token ids ``(rows, tokens)``.
        vocabulary: Number of rows of the embedding table, if there is one.
        table: The number of that table among those that are perturbed; tied layers share a table.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    mask: Tensor | None
    ids: Tensor | None
    vocabulary: int | None
    table: int = 0

    def empty(self) -> Tensor:
        """An uninitialised tensor for a perturbation of these embeddings."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def unpadded(self, noise: Tensor) -> Tensor:
        """The noise with exact zeros at padding."""
        return noise if self.mask is None else torch.where(self.mask, noise, torch.zeros_like(noise))

    def lengths(self) -> Tensor:
        """Number of real tokens of every row, ``(rows, 1, ...)``: broadcasts against the embeddings."""
        ones = (1,) * (len(self.shape) - 1)
        if self.mask is None:
            tokens = self.shape[1] if len(self.shape) > 2 else 1
            return torch.full((self.shape[0], *ones), tokens, dtype=self.dtype, device=self.device)
        return self.mask.sum(1, dtype=self.dtype).clamp(min=1).view(-1, *ones)


Noise = Callable[[Site], Tensor | None]


@contextmanager
def perturbed_embeddings(
    model: nn.Module,
    noise: Noise | None = None,
    *,
    batch: Any = None,
    embeddings: Embeddings = None,
    side: Side = "encoder",
    detach: bool = False,
    required: bool = True,
) -> Iterator[list[Site]]:
    """Within the context, every forward pass of the model sees ``embeddings + noise(site)``.

    The model needs no change and no ``inputs_embeds``: a hook on the embedding layer adds the noise to its output,
    before positions, types, LayerNorm and dropout. Encoder-decoder models are perturbed on one ``side`` only, even if
    both sides share the table or the module. Wrapped models (DDP, PEFT, ``torch.compile``) work; compiled ones
    run uncompiled inside the context, because compiled code ignores hooks that are added later.

    Padding is given by the attention mask of the call, else by the batch's ``attention_mask``, else by the layer's
    ``padding_idx``; its embeddings stay unchanged, bit for bit.

    Args:
        model: The model, with ``get_input_embeddings()`` somewhere in it unless ``embeddings`` is given.
        noise: Returns the noise of a site; None (or a function that returns None) adds nothing.
        batch: The batch, for its attention mask, if the model is called without one.
        embeddings: The layer, its name, or a predicate ``(name, module) -> bool``; None finds the word embeddings.
        side: Which side of an encoder-decoder model.
        detach: Stops the gradient from the perturbed pass into the embedding table.
        required: Whether to raise if the layer is not called inside the context.

    Yields:
        The sites visited so far; it grows with every call of the layer.

    Raises:
        RuntimeError: The embedding layer was not called inside the context (for example with ``inputs_embeds``); or,
            in backward, it is in a part of the model under activation checkpointing.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Flatten(), nn.Linear(8, 2))
        >>> with perturbed_embeddings(model, lambda site: site.empty().fill_(0.1), embeddings="0") as sites:
        ...     logits = model(torch.tensor([[3, 0]]))
        >>> sites[0].mask.flatten()
        tensor([ True, False])
    """
    found = find_embeddings(model, embeddings, side)
    state = _State(found.region is None, _batch_mask(batch, side if found.region is not None else "encoder"))
    try:
        with ExitStack() as stack:
            if found.compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if found.region is not None:
                # The same module may embed the other side, too: only calls inside this side's forward count.
                stack.callback(found.region.register_forward_pre_hook(state.enter).remove)
                stack.callback(found.region.register_forward_hook(state.leave, always_call=True).remove)
            for module in found.ancestors:
                stack.callback(module.register_forward_pre_hook(state.sees_mask(module), with_kwargs=True).remove)
            for layer, table in zip(found.layers, _tables(found.layers), strict=True):
                stack.callback(layer.register_forward_hook(state.adds(noise, detach, table)).remove)
            if noise is not None:
                stack.enter_context(recomputed_by(_refusing(found.layers)))
            yield state.sites
    finally:
        state.over = True  # if an interruption (Ctrl-C) prevents a hook from being removed, it no longer adds anything
    if required and not state.sites:
        raise RuntimeError(
            f"the embedding layer of {type(model).__name__} was not called in the pass, so nothing was perturbed; "
            "pass input_ids instead of inputs_embeds, or name the layer with embeddings=..."
        )


class _State:
    """What the hooks of one context share."""

    def __init__(self, inside: bool, fallback: Tensor | None) -> None:
        self.sites: list[Site] = []
        self.over = False
        self._inside = inside
        self._mask: Tensor | None = None
        self._fallback = fallback

    def enter(self, module: nn.Module, args: Any) -> None:
        self._inside = True
        self._mask = None  # the mask that the model was called with is that of its encoder

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False

    def sees_mask(self, module: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(module.forward).parameters)
        position = names.index("attention_mask") if "attention_mask" in names else -1

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask", args[position] if 0 <= position < len(args) else None)
            if isinstance(mask, Tensor) and mask.ndim == 2:  # inner modules may get it expanded to four dimensions
                self._mask = mask

        return hook

    def adds(self, noise: Noise | None, detach: bool, table: int) -> Callable[..., Tensor | None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
            if self.over or not self._inside:
                return None
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"{type(layer).__name__} returns a {type(output).__name__}, but noise can be added to a tensor "
                    "only; pass embeddings=... with a module that returns only the embeddings"
                )
            ids = args[0] if args and isinstance(args[0], Tensor) else None
            site = Site(
                index=len(self.sites),
                shape=output.shape,
                dtype=torch.promote_types(output.dtype, torch.float32),
                device=output.device,
                mask=self._padding(layer, ids, output),
                ids=ids,
                vocabulary=getattr(layer, "num_embeddings", None),
                table=table,
            )
            self.sites.append(site)
            added = None if noise is None else noise(site)
            base = output.detach() if detach else output
            if added is None:
                return base if detach else None
            moved = (base + added).to(output.dtype)
            return moved if site.mask is None else torch.where(site.mask, moved, base)

        return hook

    def _padding(self, layer: nn.Module, ids: Tensor | None, output: Tensor) -> Tensor | None:
        if output.ndim != 3:
            return None
        called_with, self._mask = self._mask, None
        for mask in (called_with, self._fallback):
            if mask is not None and mask.shape == output.shape[:2]:
                return (mask != 0).to(output.device).unsqueeze(-1)
        padding = getattr(layer, "padding_idx", None)
        if padding is None or ids is None or ids.shape != output.shape[:2]:
            return None
        real: Tensor = ids != padding
        return real.unsqueeze(-1)


def _refusing(layers: Sequence[nn.Module]) -> Callable[[Callable[[], Any]], Any]:
    """Recomputes a part of the model, and raises if it contains the layers, whose noise is gone by then."""

    def hook(module: nn.Module, args: Any) -> None:
        raise RuntimeError(
            f"the embedding layer ({type(module).__name__}) is inside activation checkpointing, which recomputes it "
            "in backward without the noise: move it out of the part that is checkpointed"
        )

    def by(compute: Callable[[], Any]) -> Any:
        handles = [layer.register_forward_pre_hook(hook) for layer in layers]
        try:
            return compute()
        finally:
            for handle in handles:
                handle.remove()

    return by


def _tables(layers: Sequence[nn.Module]) -> list[int]:
    """The number of the table of each layer."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(getattr(layer, "weight", layer)), len(numbers)) for layer in layers]


def _batch_mask(batch: Any, side: Side) -> Tensor | None:
    get = getattr(batch, "get", None)
    mask = get("attention_mask" if side == "encoder" else "decoder_attention_mask") if callable(get) else None
    return mask if isinstance(mask, Tensor) else None
