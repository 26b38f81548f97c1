"""What the rules work with during one forward pass: the layout of inputs, the perturbation, the calls to remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deltasam._torch import base_of, version_of
from deltasam.per_instance.algebra.factors import wide_dtype
from deltasam.per_instance.algebra.perturbation import Perturbation
from deltasam.per_instance.interception.layout import Grouping, Layout, find_layout
from deltasam.per_instance.interception.tensors import CallKey, Kind, PerInstance, Proxy
from deltasam.per_instance.verification.errors import NoRuleError

if TYPE_CHECKING:
    from deltasam.per_instance.memory import Memory

MOST_LAYOUTS = 20_000  # to remember: some hundred parameters times the lengths of texts


class Normal(NamedTuple):
    """What a norm does before it scales and shifts; equal ones can be computed together."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments)


class Call(NamedTuple):
    """One use of a parameter at w: the input, and the edge of the graph where the output's gradient will arrive.

    The edge, not the output: a model may change the output in place.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor | None
    edge: GradientEdge
    form: str  # "matrix", "rows", "norm" or "dense"
    kind: Kind
    transposed: bool = False
    padding: int | None = None
    normal: Normal | None = None  # what a norm does before it scales
    arrange: Callable[[Tensor], Tensor] | None = None  # to (G, S, *features)
    key: CallKey | None = None  # where the reading of the input is noted if its shape allowed another


def edge_of(output: Tensor) -> GradientEdge | None:
    """Where the gradient of an output arrives; as torch's ``get_gradient_edge``, without its checks.

    None in a part of the model that is computed without a graph: nothing arrives there, so there is no call to keep.
    """
    node = output.grad_fn
    return None if node is None else GradientEdge(node, output.output_nr)


def made_as(output: Tensor) -> Tensor:
    """What an output is a view of, if all of it in the same order; else the output itself.

    ``F.linear`` with a bias puts out such a view. When it is changed in place, autograd goes past the view, and its
    gradient arrives at what it is a view of only.
    """
    base = base_of(output)
    whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if base is not None and whole else output


class PassState:
    """One forward pass at w (recording) or at w + eps_i (perturbed), or both.

    Args:
        grouping: How many instances, and how many share a perturbation.
        names: Names of the perturbed parameters by ``id``.
        memory: What earlier passes learned about the model.
        perturbation: eps, or None at w.
        recording: Whether to remember the calls.
    """

    def __init__(
        self,
        grouping: Grouping,
        names: Mapping[int, str],
        memory: Memory,
        perturbation: Perturbation | None,
        recording: bool,
    ) -> None:
        self.grouping = grouping
        self.names = names
        self.reading = memory.reading
        self._memory = memory
        self.perturbation = perturbation
        self.recording = recording
        self.calls: list[Call] = []
        self.seen = memory.reading.seen = {}
        # By parameter, and whether there is a graph: what was made without one has no way back to the parameter.
        self._values: dict[tuple[int, bool], Tensor] = {}
        self._expanded: dict[tuple[int, bool], Tensor] = {}
        self._last: tuple[Tensor, tuple[Kind, bool, int], Tensor, Tensor] | None = None
        self.size = grouping.size

    def layout(self, tensor: Tensor, parameter: Proxy, features: int) -> Layout:
        """How the instances lie in an input of ``parameter``'s layer."""
        name = self.names[id(parameter.parameter)]
        known = (name, tensor.shape, features, type(tensor) is PerInstance, self.size)
        layout = self._memory.layouts.get(known)
        if layout is None:
            if len(self._memory.layouts) > MOST_LAYOUTS:
                self._memory.layouts.clear()
            layout = self._memory.layouts[known] = find_layout(tensor, features, self.size, self.reading, name)
        if self.recording and layout.key is not None:
            self.reading.note(layout.key, layout.kind)
        return layout

    def refuse(self, operation: str, *parameters: Any) -> NoReturn:
        """Says that an operation cannot be carried out for every instance; the loop takes over."""
        raise NoRuleError(operation, [self.names[id(p.parameter)] for p in parameters if isinstance(p, Proxy)])

    def data(self, x: Tensor) -> Tensor:
        """An input of a layer; a parameter that serves as one (DeBERTa's relative positions) is written out."""
        return self.expanded(x) if isinstance(x, Proxy) else x

    def rows(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Inputs as ``(G, S, in)``, cast once under autocast; the same for query and key. Second, what to record."""
        last, how = self._last, (layout.kind, torch.is_grad_enabled(), version_of(x))  # it may be changed in place
        if last is None or last[0] is not x or last[1] != how:
            source = x.inner if type(x) is PerInstance else x
            kind = source.device.type
            if torch.is_autocast_enabled(kind) and source.dtype is not torch.float64:
                source = source.to(torch.get_autocast_dtype(kind))
            inside = PerInstance.wrap(source, self.reading) if type(x) is PerInstance else source
            rows = inside if layout.is_erm and self.grouping.m == 1 else self.grouping.rows(layout.split(inside, 1))
            self._last = last = (x, how, rows, rows.detach() if self.recording else rows)
        return last[2], last[3]

    def matrix(
        self,
        weight: Proxy,
        bias: Any,
        x: Tensor,
        y: Tensor,
        recorded: Tensor,
        layout: Layout,
        transposed: bool = False,
    ) -> Tensor:
        """Output ``y`` (G, S, out) of a layer that multiplies ``x`` (G, S, in) by the weight and adds the bias."""
        offset = bias.parameter if isinstance(bias, Proxy) else None
        if self.perturbation is not None:
            y = self.perturbation.linear(weight.parameter, offset, x, y, transposed)
        if self.recording and (edge := edge_of(made_as(y))) is not None:
            call = Call(weight.parameter, offset, recorded, edge, "matrix", layout.kind, transposed, key=layout.key)
            shape = y.shape
            self.calls.append(call._replace(arrange=lambda gradient: gradient.reshape(shape)))
        return y

    def table(self, weight: Proxy, ids: Tensor, y: Tensor, layout: Layout, padding: int | None) -> Tensor:
        """Output ``y`` (G, S, out) of a lookup of ``ids`` (G, S)."""
        if self.perturbation is not None:
            y = self.perturbation.rows(weight.parameter, ids, y)
        if self.recording and (edge := edge_of(y)) is not None:
            call = Call(weight.parameter, None, ids, edge, "rows", layout.kind, padding=padding, key=layout.key)
            self.calls.append(call)
        return y

    def norm_layout(self, x: Tensor, weight: Any, bias: Any) -> Layout | None:
        """At w a norm is computed as it is, and its gradient made of input and output afterwards, which is cheaper.

        None where it cannot, or not at w.
        """
        if self.perturbation is not None or type(x) is PerInstance or not isinstance(weight, Proxy):
            return None
        if bias is not None and not isinstance(bias, Proxy):
            return None
        found = self.layout(x, weight, weight.parameter.ndim)
        return None if found.kind == "shared" else found

    def norm(self, weight: Proxy, bias: Any, x: Tensor, y: Tensor, layout: Layout, normal: Normal) -> Tensor:
        """Output ``y`` of a layer that scales and shifts ``normal(x)``, at w."""
        if self.recording and (edge := edge_of(y)) is not None:
            offset = None if bias is None else bias.parameter
            features, grouping = weight.parameter.ndim, self.grouping

            def arrange(tensor: Tensor) -> Tensor:  # not of self, whose calls it is kept in: that would be a cycle
                return grouping.rows(layout.split(tensor, features))

            call = Call(weight.parameter, offset, x.detach(), edge, "norm", layout.kind)
            self.calls.append(call._replace(normal=normal, arrange=arrange, key=layout.key))
        return y

    def values(self, proxy: Proxy) -> Tensor:
        """The parameter of every instance, ``(N, *shape)``, written out: for what is small. Float32 at least."""
        parameter = proxy.parameter
        name = (id(parameter), torch.is_grad_enabled())
        if name not in self._values:  # made once in a pass, so that one gradient collects all uses
            if self.perturbation is None:
                wide = parameter.to(wide_dtype(parameter.dtype)).unsqueeze(0).expand(self.size, *parameter.shape)
            else:
                wide = self.perturbation.values(parameter)
            if self.recording and (edge := edge_of(wide)) is not None:
                self.calls.append(Call(parameter, None, None, edge, "dense", "hidden"))
            self._values[name] = wide
        return self._values[name]

    def expanded(self, proxy: Proxy) -> Tensor:
        """The parameter of every instance as a tensor the model can compute with in any operation."""
        name = (id(proxy.parameter), torch.is_grad_enabled())
        if name not in self._expanded:
            self._expanded[name] = PerInstance.wrap(self.values(proxy).to(proxy.dtype), self.reading)
        return self._expanded[name]
