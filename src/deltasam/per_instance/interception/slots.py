"""The module attributes that hold the parameters of a model, and the proxies that take their places during a pass."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain, starmap
from operator import attrgetter, setitem
from typing import Any

import torch
from torch import Tensor, nn

from deltasam._torch import (
    BATCH_NORM,
    buffers_of,
    children_of,
    forward_pre_hooks_of,
    is_compiler_loaded,
    parameters_of,
    tensor_hooks_of,
)
from deltasam.parallel.refusals import require_whole
from deltasam.parallel.shards import sharded_modules
from deltasam.per_instance.algebra.gradient import InstanceGradients
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.perturbation import Perturbation
from deltasam.per_instance.errors import InstancesMixedError, SizeUnknownError
from deltasam.per_instance.interception.kept_values import plain_afterwards
from deltasam.per_instance.interception.memory import memory_of
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.quantized_layers import perturbed_forward
from deltasam.per_instance.interception.shortcuts import SHORTCUTS, lengthening, shorten
from deltasam.per_instance.interception.tensors import PerInstance
from deltasam.step.adapter_inputs import SWITCH, UnlessAutocast, casting
from deltasam.step.adapters import refuse_attention
from deltasam.step.checks import require_apart, sharing
from deltasam.step.quantized import layer_of

_MOST_COMPARED = 2**26  # elements of frozen parameters: 256 MB of gradients in float32

_training = attrgetter("training")
_READ: tuple[Callable[[Any], Any], ...] = (
    id,
    type,
    *map(attrgetter, ("device", "dtype", "shape")),
    Tensor.data_ptr,
    Tensor.is_contiguous,
)


class ParameterSlots:
    """Every attribute of a module that holds one of the chosen parameters, tied ones included.

    Quantized layers have no such attribute: their ``forward`` is replaced.

    Attributes:
        model: The model.
        params: The chosen parameters by name.
        frozen: The names of those that are not trained.
        hooked: Those with hooks that may change their gradient, and the numbers of the hooks.
        modes: Which modules are in training mode.

    Raises:
        InstancesMixedError: A BatchNorm of the model is in training mode.
        ValueError: One of them shares its memory with another parameter.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        require_whole("the per-instance engine", list(params.values()))
        self.model = model
        self.params = params
        self.compiled: Callable[[Any], AbstractContextManager[None]] | None = None  # opens its perturbed passes
        self.memory = memory_of(model)
        self.names = {id(p): name for name, p in params.items()}
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._beside_slots: list[tuple[dict[str, Any], str, None]] = []  # buffers of the names of the slots
        self._with_shortcuts: list[nn.Module] = []
        self._changes: list[tuple[dict[str, Any], str, Any]] = []  # other attributes of modules during a pass
        unless_autocast = UnlessAutocast(next(iter(model.parameters())).device.type)
        self._with_pre_hooks: list[dict[str, Any]] = []  # attributes of modules whose hooks may compute weights
        self.is_sharded = bool(sharded_modules(model))
        names, others = self.names, list[Tensor]()
        modules = all_modules(model)
        self.modes = bytes(map(_training, modules))
        for module in modules:  # one walk for all questions: on a fast device its time counts
            kind = type(module)
            if kind in SHORTCUTS:
                self._with_shortcuts.append(module)
            elif issubclass(kind, BATCH_NORM):
                refuse_batch_statistics(model)
            if forward_pre_hooks_of(module):
                self._with_pre_hooks.append(vars(module))
            if children_of(module) and (attributes := casting(module)) is not None:
                self._changes.append((attributes, SWITCH, unless_autocast))
            if own := parameters_of(module):
                for name, p in own.items():
                    if id(p) in names:
                        self._slots.append((own, name, p))
                        self._beside_slots.append((buffers_of(module), name, None))
                    elif p is not None:
                        others.append(p)
        is_known = self._was_checked(others)
        quantized = [(layer, p) for p in params.values() if (layer := layer_of(p)) is not None]
        replaced = [*(p for _, _, p in self._slots), *(p for _, p in quantized)]
        self._proxies = self.memory.proxies(replaced, are_known=is_known)
        self._filled = [(own, name, self._proxies[id(p)]) for own, name, p in self._slots]
        for layer, p in quantized:
            self._changes.append((vars(layer), "forward", perturbed_forward(layer, self._proxies[id(p)])))
        self.hooked = tensor_hooks_of(params)
        # Noted here, because a pass changes both.
        self.frozen = {name for name, p in params.items() if not p.requires_grad}
        self._beside = {id(p) for layer, _ in quantized for p in layer.parameters(recurse=False)}

    def _was_checked(self, others: list[Tensor]) -> bool:
        """Whether these parameters were here in the last step; if not, refuses those that share memory."""
        places = _places([*self.params.values(), *others], len(self.params))
        if places is not None and places == self.memory.places:
            return True
        refuse_attention(self.model)
        if sharing(self.params.values(), others):
            require_apart(self.params.values(), dict(self.model.named_parameters()))  # names them in the error
        self.memory.places = places
        return False

    @cached_property
    def compared(self) -> dict[str, Tensor]:
        """The parameters to compare with autograd on first use, which holds their gradients at once.

        Those that are trained have gradients of that size anyway. Of frozen ones that are too many, the layers of one
        kind, whose names differ in numbers only, are represented by the first: they run through the same code.
        """
        # Quantized weights have no gradient, and the factors of their biases are folded into theirs.
        ordinary = {name: p for name, p in self.params.items() if layer_of(p) is None and id(p) not in self._beside}
        if sum(p.numel() for name, p in ordinary.items() if name in self.frozen) <= _MOST_COMPARED:
            return ordinary
        first = first_of_each_kind(name.rpartition(".")[0] for name in ordinary if name in self.frozen)
        return {n: p for n, p in ordinary.items() if n not in self.frozen or n.rpartition(".")[0] in first}

    @contextmanager
    def filled(
        self, size: int | None, group: int, terms: Sequence[tuple[InstanceGradients, Tensor]], *, recording: bool
    ) -> Iterator[Callable[[], PassState]]:
        """Puts proxies into the slots, and always puts the parameters back.

        Yields:
            A function that returns the state of the pass, after the model was called.
        """
        states: list[PassState] = []
        shortened: list[dict[str, Any]] = []
        made = [
            (own, name, value)
            for own in self._with_pre_hooks
            for name, value in own.items()
            if isinstance(value, Tensor)
        ]
        had = [(own, name, own[name]) for own, name, _ in self._changes if name in own]
        had_not = [(own, name, None) for own, name, _ in self._changes if name not in own]
        back = chain(
            starmap(setitem, self._slots),
            # PEFT's LoRA of a parameter (target_parameters) puts back what it found, and a proxy as a buffer.
            starmap(dict.pop, self._beside_slots),
            starmap(setitem, had),
            starmap(dict.pop, had_not),
            lengthening(shortened),
        )

        def start(count: int) -> None:
            grouping = Grouping(count, min(group, count))
            # FSDP takes the gradients of a layer when its backward is over; those of a pack come later.
            packed = len(terms) == 1 and not self.is_sharded
            vectors = terms[0][0].vectors if packed else {}
            for stack in terms[0][0].stacks if len(terms) == 1 and not recording else ():
                if stack.once:
                    stack.scale(terms[0][1])
            perturbation = Perturbation(grouping, _by_parameter(terms), vectors) if terms else None
            state = PassState(grouping, self.names, self.memory, perturbation, recording)
            states.append(state)
            for proxy in self._proxies.values():
                proxy.state = state
            deque(starmap(setitem, self._filled), maxlen=0)
            deque(starmap(setitem, self._changes), maxlen=0)
            shortened.extend(shorten(self._with_shortcuts, state))

        def start_when_called(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not states:
                start(max(1, leading([*args, *kwargs.values()])))  # the objective will reject an empty batch

        handle = None
        try:
            if size is not None:
                start(size)
            else:
                handle = self.model.register_forward_pre_hook(start_when_called, with_kwargs=True)
            with plain_afterwards(self.model, self.memory, is_at_w=not terms), eager():
                yield lambda: _started(states)
        finally:
            deque(back, maxlen=0)  # first, and in one call: an interruption (Ctrl-C) finds all slots restored or none
            if handle is not None:
                handle.remove()
            for own, name, value in made:
                if isinstance(own.get(name), PerInstance):
                    own[name] = value
            for proxy in self._proxies.values():
                proxy.__dict__.pop("state", None)  # frees what the pass has recorded


def all_modules(model: nn.Module) -> list[nn.Module]:
    """``model.modules()`` in another order: without its recursion, which takes as long as everything done here."""
    found, left = {id(model): model}, [model]
    while left:
        for child in children_of(left.pop()).values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                left.append(child)
    return list(found.values())


def _places(params: list[Tensor], chosen: int) -> list[list[Any]] | None:
    """Where parameters are in memory, the chosen ones first; None if it is not known. Keeps nothing alive."""
    try:
        return [[chosen], *(list(map(read, params)) for read in _READ)]
    except RuntimeError:  # a parameter without plain memory, such as a sparse one
        return None


def first_of_each_kind(names: Iterable[str]) -> set[str]:
    """Of names that differ in numbers only, the first."""
    return set({re.sub(r"\d+", "#", name): name for name in reversed(list(names))}.values())


def _started(states: list[PassState]) -> PassState:
    if not states:
        raise SizeUnknownError(
            "the model was not called as a whole, so the number of instances is not known; pass size=N"
        )
    return states[0]


def _by_parameter(terms: Sequence[tuple[InstanceGradients, Tensor]]) -> dict[int, list[tuple[Any, Tensor]]]:
    table: dict[int, list[tuple[Any, Tensor]]] = {}
    for gradients, c in terms:
        for name, factors in gradients.factors.items():
            table.setdefault(name, []).extend((factor, c) for factor in factors)
    return table


def leading(values: list[Any]) -> int:
    """The leading dimension of the first tensor."""
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            return int(value.shape[0])
        if isinstance(value, Mapping):
            return leading(list(value.values()))
        if isinstance(value, (tuple, list)) and value:
            return leading(list(value))
    raise SizeUnknownError("the number of instances is not visible in the model's inputs; pass size=N")


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises :class:`InstancesMixedError` if a BatchNorm of the model is in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and (module.training or module.running_mean is None):
            raise InstancesMixedError(
                f"{name or 'the model'} ({type(module).__name__}) normalises with statistics of the whole batch, so a "
                "perturbation per instance is not defined; put it in eval mode, or use GroupNorm or LayerNorm"
            )


def eager() -> AbstractContextManager[Any]:
    """Runs compiled models as written: compiled code would not see the proxies."""
    return torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext()
