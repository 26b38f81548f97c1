"""When memory runs out: repeats the step with the batch in smaller parts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deltasam._torch import BATCH_NORM
from deltasam.methods import Method, Step
from deltasam.objectives import Objective
from deltasam.parallel.shards import is_distributed
from deltasam.step.batches import MicroBatches, batch_size, obstacle_to_cut, take, tensors
from deltasam.step.checks import check_number
from deltasam.step.draws import use_of
from deltasam.step.gradients import set_aside
from deltasam.step.model_buffers import ModelBuffers
from deltasam.step.passes import ObjectiveLike, Scaler, prepare_objective
from deltasam.step.randomness import RandomState, accelerators, generators_of
from deltasam.step.step_batch import prepared

OnOutOfMemory = Literal["stop", "split"]

_log = logging.getLogger(__name__)


class Splitting:
    r"""A method whose ``backward`` halves the batch when memory runs out, and continues with the halves.

    The parts are :class:`~deltasam.MicroBatches`: one perturbation for all of them, so that the gradient is that of
    the whole batch, up to rounding, with the activation memory of one part. (Dropout masks and the initial noise of
    :class:`~deltasam.FreeLB` are drawn part by part: other draws from the same distribution.) The size that fitted is
    kept for later batches; each time it is halved, a warning is logged.

    Before it tries again, it restores the weights, ``.grad``, the buffers and the random streams. Cost if memory
    suffices: a copy of the buffers; and while gradients are accumulated over several calls, another copy of them,
    since a failed attempt must not leave anything in ``.grad``.

    Args:
        method: The method.
        largest: Maximum number of instances per part; None as long as memory has not run out.

    Raises:
        ValueError: Splitting would change the method or objective, see :meth:`check`; or ``largest`` is not a size.

    Example:
        >>> from deltasam import SAM
        >>> def hungry(model, x):
        ...     if len(x) > 2:
        ...         raise torch.OutOfMemoryError("no memory for more than two instances")
        ...     return model(x).squeeze(-1) ** 2
        >>> method = Splitting(SAM(rho=0.05))  # use it like the method itself
        >>> method.backward(nn.Linear(2, 1), torch.ones(8, 2), hungry).losses.shape, method.largest
        (torch.Size([8]), 2)
    """

    def __init__(self, method: Method, *, largest: int | None = None) -> None:
        if largest is not None:
            check_number("largest", largest, 1, whole=True)
        self.method = method
        self.largest = largest
        self.check(None)

    def __getattr__(self, name: str) -> Any:
        """Delegates everything else to the method: ``state_dict``, ``rho``, ``skipped``, ..."""
        if name == "method":  # a copy under construction has none yet
            raise AttributeError(name)
        return getattr(self.method, name)

    def check(self, objective: Any, *, processes: int | None = None) -> None:
        """Refuses methods and objectives that splitting would change.

        Args:
            objective: The objective; None if it is not known yet.
            processes: The number of processes, if it is known before ``torch.distributed`` is initialised.

        Raises:
            ValueError: The losses depend on other instances of the batch, the method picks some of the instances,
                or several processes train the model.
        """
        if getattr(objective, "separable", True) is False:
            raise ValueError(
                f"on_out_of_memory='split' cannot be used with {type(objective).__name__}, which "
                f"{getattr(objective, 'mixing', Objective.mixing)}: parts of the batch have other losses. Use "
                "'stop' and a smaller batch"
            )
        if not self.method.supports_micro_batches():
            raise ValueError(
                f"on_out_of_memory='split' cannot be used with {type(self.method).__name__}, which picks instances "
                "from the whole batch: use 'stop' and a smaller batch"
            )
        if processes is None:
            processes = torch.distributed.get_world_size() if is_distributed() else 1
        if processes > 1:
            raise ValueError(
                f"on_out_of_memory='split' works in one process, but there are {processes}: the others would wait "
                "for the gradients of the one that ran out of memory. Use 'stop' and a smaller batch, or "
                "deltasam.MicroBatches in all of them"
            )

    def backward(
        self, model: nn.Module, batch: Any, objective: ObjectiveLike, *, scale: float | Tensor | Scaler = 1.0
    ) -> Step:
        """As :meth:`deltasam.methods.Method.backward`: adds the method's gradient to ``.grad``.

        Raises:
            torch.OutOfMemoryError: The batch cannot be split, or one instance does not fit.
        """
        self.check(objective)
        prepare_objective(objective, model)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        streams = RandomState.now(accelerators([*model.parameters(), *tensors(batch)]), generators_of(model))
        buffers = ModelBuffers(model)
        given = prepared(objective, model, batch)  # a row is an instance only afterwards
        parts = self._parts(given) if self.largest is not None else given
        while True:
            try:
                with set_aside(trainable):
                    return self.method.run_step(self.method.passes_for(model, parts, objective, scale=scale))
            except torch.OutOfMemoryError as error:
                why = str(error)  # the error itself keeps the frames alive, and those the graph
            streams.restore(use_of(model).streams())
            buffers.restore()
            gc.collect()  # the memory of the failed attempt
            device = next(iter(trainable.values())).device
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).empty_cache()
            self._halve(model, parts, why)
            parts = self._parts(given)

    def _halve(self, model: nn.Module, parts: MicroBatches, why: str) -> None:
        sizes = [_size(part) for part in parts]
        group = int(getattr(self.method, "group", 1))  # instances that share a perturbation stay together
        fits = (max(size or 0 for size in sizes) // 2) // group * group
        obstacle = _obstacle(model, parts)
        if obstacle is None and fits < group:
            obstacle = f"parts of {max(size or 0 for size in sizes)} instances cannot be made smaller"
        if obstacle is not None:
            raise torch.OutOfMemoryError(f"{why}\non_out_of_memory='split' does not help: {obstacle}")
        self.largest = fits
        _log.warning(
            "memory ran out in a step over parts of %s instances; from here on batches are split into parts of at "
            "most %d, and each step still uses one perturbation for all its parts",
            ", ".join(str(size) for size in dict.fromkeys(sizes)),
            fits,
        )

    def _parts(self, batches: MicroBatches) -> MicroBatches:
        return MicroBatches(piece for batch in batches for piece in self._pieces(batch))

    def _pieces(self, batch: Any) -> Iterator[Any]:
        size = _size(batch)
        if self.largest is None or size is None or size <= self.largest:
            yield batch
            return
        for index in torch.split(torch.arange(size, device="cpu"), self.largest):
            yield take(batch, index, size)


def check_out_of_memory(value: str, *, capture: bool) -> None:
    """Raises a ValueError for an unknown option, or one that excludes recording steps as CUDA graphs."""
    if value not in ("stop", "split"):
        raise ValueError(f"on_out_of_memory={value!r} must be 'stop' or 'split'")
    if value == "split" and capture:
        raise ValueError(
            "capture=True and on_out_of_memory='split' exclude each other: a step that was recorded for a whole batch "
            "cannot be replayed for its parts; choose one"
        )


def _size(batch: Any) -> int | None:
    """The number of instances of a batch that can be split; None if it cannot."""
    size = batch_size(batch)
    return None if size is None or obstacle_to_cut(batch, size) is not None else size


def _obstacle(model: nn.Module, parts: MicroBatches) -> str | None:
    if any(_size(part) is None for part in parts):
        return "the batch does not consist of tensors with one row per instance (and lists of texts)"
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and (module.training or module.running_mean is None):
            return f"{name} ({type(module).__name__}) uses statistics of the whole batch; put it in eval mode"
    return None
