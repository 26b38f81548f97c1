"""Constants that a model makes on the host in every step.

A CUDA graph cannot record a copy from ordinary memory of the host. A single number is filled in on the device instead
(:func:`filled_numbers`). A tensor, such as the relative positions in MPNet, is kept by the ordinary step that is
observed before the recording, and the recording reads what was kept (:class:`HostConstants`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import any_compiled
from deltasam.step.batches import tensors

_REPLACING = threading.RLock()  # the methods of torch belong to all threads
_LARGEST = 2**22  # numbers; a larger tensor is data, not a constant
Make = Callable[[], Tensor]
Move = Callable[[Tensor, Make], Tensor]  # from the tensor on the host, and the function that copies it


class HostConstants:
    """The copies from the host to the device that an ordinary step makes, in the order of the step.

    A copy is a constant if the step that is recorded would copy the same values again. If the model or its inputs have
    tensors on the host, nothing is taken for a constant: two batches may agree by chance. If a part of the model is
    compiled, the compiler would trace the functions that replace those of torch, and compile again without them.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        given = (*model.parameters(), *model.buffers(), *tensors(inputs))
        on_device = all(each.device.type != "cpu" for each in given)
        self._possible = on_device and not any_compiled(model.modules())
        self._found: list[tuple[Tensor, Tensor]] = []  # on the host, on the device

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around an ordinary step: keeps what is copied."""

        def move(tensor: Tensor, make: Make) -> Tensor:
            made = make()
            self._found.append((tensor.clone(), made.clone()))
            return made

        with self._instead(move):
            yield

    @contextmanager
    def read(self) -> Iterator[None]:
        """Around a recording: the same values are not copied again. Others are, and the recording fails there."""
        waiting = iter(self._found)

        def move(tensor: Tensor, make: Make) -> Tensor:
            for known, place in waiting:  # an ordinary step may copy more than a recorded one
                if known.dtype == tensor.dtype and torch.equal(known, tensor):
                    return place.clone()  # the model may write to it
            return make()

        with self._instead(move):
            yield

    @contextmanager
    def _instead(self, move: Move) -> Iterator[None]:
        """Inside, ``move`` makes the copies of this thread: ``tensor.to(device)`` and ``tensor.cuda()``."""
        if not self._possible:
            yield
            return
        here = threading.get_ident()

        def replacement(name: str) -> Callable[..., Tensor]:
            def moved(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
                def make() -> Tensor:
                    made: Tensor = own[name](tensor, *args, **options)
                    return made

                is_move = name == "cuda" or _leaves_the_host(args, options)
                if is_move and threading.get_ident() == here and _may_be_constant(tensor):
                    return move(tensor, make)
                return make()

            return moved

        with _REPLACING:
            own = {name: getattr(Tensor, name) for name in ("to", "cuda")}
            set_before = {name: vars(Tensor)[name] for name in own if name in vars(Tensor)}  # usually inherited
            try:
                for name in own:
                    setattr(Tensor, name, replacement(name))
                yield
            finally:
                for name in own:
                    delattr(Tensor, name)
                for name, method in set_before.items():
                    setattr(Tensor, name, method)


def _may_be_constant(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.numel() <= _LARGEST
        and not tensor.is_pinned()  # a graph copies from pinned memory, whatever is in it by then
    )


def _leaves_the_host(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether ``tensor.to(*args, **options)`` names a device other than the CPU."""
    for given in (*args[:1], options.get("device"), options.get("other")):
        if isinstance(given, Tensor):
            return given.device.type != "cpu"
        if isinstance(given, (str, torch.device)):
            return torch.device(given).type != "cpu"
        if isinstance(given, int):  # the number of a GPU
            return True
    return False


@contextmanager
def filled_numbers() -> Iterator[None]:
    """Inside, ``torch.tensor(0.0, device="cuda")`` fills memory of the device instead of copying from the host.

    Models of transformers with eager attention make such numbers for their masks.
    """
    own = torch.tensor

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if on_gpu and not args and isinstance(data, (bool, int, float)) and not options.get("pin_memory"):
            return torch.full((), data, **{key: value for key, value in options.items() if key != "pin_memory"})
        return own(data, *args, **options)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = own
