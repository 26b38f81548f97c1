"""The buffers of a method: state tensors that it keeps between steps, such as an average of gradients.

(Those of the model, such as BatchNorm's statistics: :mod:`deltasam.step.model_buffers`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from deltasam.parallel.shards import is_shard, local, remembered, shard_like
from deltasam.step.branches import is_recorded
from deltasam.step.norms import global_norm
from deltasam.step.passes import Passes


class Buffer:
    """One tensor per parameter that a method keeps between steps; see :meth:`deltasam.methods.Method.buffer`.

    Gradients within a step have the loss scale, and so have the tensors that iteration yields. What is stored has not:
    :meth:`update` divides by the scale, iteration multiplies by it. So the arithmetic of a method is right with any
    ``GradScaler``. Iteration yields new tensors; only :meth:`update` changes the buffer, in place, so that a captured
    step can replay. ``on_update`` is called before an update and returns whether to make it.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        params: Sequence[nn.Parameter],
        passes: Passes,
        on_update: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tensors = tensors
        self._params = params
        self._on_update = on_update
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        one = torch.ones((), dtype=dtype, device=passes.device)
        scale = passes.scaled(one)
        self._scale = None if scale is one else scale

    def __len__(self) -> int:
        return len(self._tensors)

    @torch.no_grad()
    def __iter__(self) -> Iterator[Tensor]:
        """The tensors, times the loss scale of this step."""
        for tensor, p in zip(self._tensors, self._params, strict=True):
            here = local(tensor)
            copy = here.clone() if self._scale is None else here * self._scale.to(here.device)
            yield shard_like(copy, p)

    @torch.no_grad()
    def update(self, values: Sequence[Tensor | None], decay: float = 0.0) -> None:
        """Replaces the buffer by ``decay * buffer + (1 - decay) * values``, in place.

        If any value is inf or nan, the whole buffer stays as it is. Nothing synchronises with the device. A step that
        failed after its update (out of memory) and is repeated updates the buffer once.

        Args:
            values: One tensor per parameter, with the loss scale; None leaves that parameter's tensor as it is.
            decay: 0 stores the values themselves.
        """
        given = [(t, v) for t, v in zip(self._tensors, values, strict=True) if v is not None]
        if not given or not self._on_update():
            return
        is_finite = torch.isfinite(global_norm([v for _, v in given]))
        for tensor, value in given:
            here, new = local(tensor), local(value.to_dense() if value.is_sparse else value)
            if self._scale is not None:
                new = new / self._scale.to(new.device)
            blended = torch.lerp(here, new.to(here.dtype), 1 - decay)
            torch.where(is_finite.to(here.device), blended, here, out=here)


def fitted(value: Tensor | None, p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor that was kept for a parameter, perhaps by a checkpoint, with its device and layout; zeros for None."""
    dtype = dtype or p.dtype
    if value is not None and (is_shard(p) or is_shard(value)):
        value = remembered(value, p)
    if value is not None and (value.device, value.dtype) == (p.device, dtype):
        return value
    require_outside_recording(p.device)
    if value is None:
        return shard_like(torch.zeros_like(local(p.detach()), dtype=dtype), p)
    return value.to(p.device, dtype)


def require_outside_recording(device: torch.device) -> None:
    """Raises a RuntimeError while a CUDA graph is recorded: later recordings reuse its memory."""
    if is_recorded(device):
        raise RuntimeError("a buffer of the method does not exist yet: run an ordinary step first, which allocates it")


def addresses(value: Tensor | Mapping[str, Tensor]) -> tuple[object, ...]:
    """Where a buffer is in memory; a captured step is valid until it moves."""
    tensors = [value] if isinstance(value, Tensor) else value.values()
    return tuple((t.data_ptr() if t.layout is torch.strided else id(t), t.shape) for t in tensors)


def copied(value: object) -> object:
    """A copy of a buffer for a checkpoint."""
    if isinstance(value, Mapping):
        return {name: copied(each) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    # clone() of a shard may return it with an equal mesh of this process, and so hide which process saved it.
    return shard_like(local(value).clone(), value)
