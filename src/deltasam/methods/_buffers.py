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

    Within a step gradients carry the loss scale, and so do the tensors that iteration yields. What is stored does not:
    :meth:`update` divides by the scale, iteration multiplies by it. The arithmetic of a method is therefore right with
    any ``GradScaler``. Iteration yields new tensors; only :meth:`update` changes the buffer.

    Args:
        tensors: The tensors, one per parameter. They are changed in place, so that a captured step can replay.
        params: The parameters.
        passes: The passes of the step.
        on_update: Called before an update; returns whether to go on.
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
            values: One tensor per parameter, carrying the loss scale; None leaves that parameter's tensor as it is.
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
    """What was kept for a parameter, on its device and laid out as it is; zeros if there is nothing yet.

    Args:
        value: What was kept, perhaps by a checkpoint. Its shape fits.
        p: The parameter.
        dtype: That of the result; the parameter's by default.
    """
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
    """Raises a RuntimeError while a CUDA graph is recorded, whose memory later recordings use again."""
    if is_recorded(device):
        raise RuntimeError("a buffer of the method does not exist yet: an ordinary step has to allocate it")


def addresses(value: Tensor | Mapping[str, Tensor]) -> tuple[object, ...]:
    """Where a buffer is in memory: a captured step is valid as long as it is there."""
    tensors = [value] if isinstance(value, Tensor) else value.values()
    return tuple((t.data_ptr() if t.layout is torch.strided else id(t), t.shape) for t in tensors)


def copied(value: object) -> object:
    """A copy of a buffer, of which checkpoints are made."""
    if isinstance(value, Mapping):
        return {name: copied(each) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    # clone() of a shard may return it with an equal mesh of this process, and so hide which process has saved it.
    return shard_like(local(value).clone(), value)
