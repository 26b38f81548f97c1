"""Runs the graph of a model with perturbed parameters: the rules of the operations, without proxies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.fx import GraphModule, Interpreter

from deltasam._torch import tree_leaves
from deltasam.per_instance.algebra.calls import Call, Form, Normal
from deltasam.per_instance.algebra.factors import wide_dtype
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.operations import add_to_linear
from deltasam.per_instance.algebra.perturbation import Perturbation
from deltasam.per_instance.compiling.errors import NotCompilableError
from deltasam.per_instance.interception.batch_rule import LayoutTable
from deltasam.per_instance.interception.layout import Layout, find_layout

#: Operations that work number by number, with broadcasting; all but the last row take several tensors.
_ELEMENTWISE = {
    "add", "sub", "mul", "truediv", "div", "iadd", "isub", "imul", "itruediv", "rsub", "__add__", "__mul__",
    "to", "float", "double", "half", "bfloat16", "neg", "type_as",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Weight:
    """A perturbed parameter: its name, and its value in this pass."""

    name: str
    value: Tensor


@dataclass(frozen=True, eq=False)
class Hidden:
    """A value that the model computes once, but that differs between the instances: (N, *shape)."""

    inner: Tensor


class PlannedCall(NamedTuple):
    """A :class:`Call` whose parameters are given by name, and whose input by its number."""

    weight: str
    bias: str | None
    inputs: int | None
    form: Form
    transposed: bool = False
    padding: int | None = None
    normal: Normal | None = None
    arrange: Callable[[Tensor], Tensor] | None = None

    def call(self, params: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Call:
        """The call itself."""
        return Call(
            params[self.weight],
            None if self.bias is None else params[self.bias],
            None if self.inputs is None else inputs[self.inputs],
            _NO_EDGE,
            self.form,
            self.transposed,
            self.padding,
            self.normal,
            self.arrange,
        )


_NO_EDGE: GradientEdge = GradientEdge(None, 0)  # type: ignore[arg-type]  # the gradient arrives at a tap


class _Tap(torch.autograd.Function):
    """``y`` itself; its gradient is also that of ``tap``, an input of the same shape that is not read."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tap: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


class InstanceInterpreter(Interpreter):
    """One pass over the graph of a model that records the calls, or at w + eps_i.

    Args:
        graph: What ``torch.compile`` has traced.
        names: The perturbed parameters: their names by the number of the input that they are.
        grouping: The instances.
        table: How the tensors of the model are read.
        perturb: Makes the perturbation of the values of the parameters by name; None for a recording.
        constant: The inputs that take no gradient: all parameters, in a recording.
        taps: For a recording: one per call, from an earlier pass; by default they are made.
    """

    def __init__(
        self,
        graph: GraphModule,
        names: Mapping[int, str],
        grouping: Grouping,
        table: LayoutTable,
        *,
        perturb: Callable[[Mapping[str, Tensor]], Perturbation] | None = None,
        constant: frozenset[int] = frozenset(),
        taps: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._names, self._grouping, self._table, self._size = names, grouping, table, grouping.size
        self._perturb, self._constant, self._given = perturb, constant, taps
        self._perturbation: Perturbation | None = None
        self.calls: list[PlannedCall] = []
        self.taps: list[Tensor] = []
        self.inputs: list[Tensor] = []  # of the calls; one that several share is there once
        self._numbers: dict[int, int] = {}
        self._values: dict[str, Tensor] = {}
        self._rows_of: tuple[Any, Tensor, Tensor] | None = None

    def run_pass(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the graph."""
        if self._perturb is not None:
            self._perturbation = self._perturb({name: inputs[k] for k, name in self._names.items()})
        given = [
            Weight(self._names[k], value.detach() if k in self._constant else value)
            if k in self._names
            else value.detach()
            if k in self._constant
            else value
            for k, value in enumerate(inputs)
        ]
        outputs = tuple(self.run(*given))
        if any(isinstance(output, (Weight, Hidden)) for output in outputs):
            raise NotCompilableError("the model returns a value that is the same for all instances")
        return outputs

    # -- the nodes of the graph ----------------------------------------------------------------------------------

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant."""
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, (nn.Parameter, nn.Module)):
            raise NotCompilableError("the compiler has put parameters into a part of the graph (checkpointing?)")
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch."""
        return self._operation(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A method of a tensor."""
        return self._operation(getattr(Tensor, str(target)), args, kwargs)

    def _operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        if not any(isinstance(leaf, (Weight, Hidden)) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        rule = _RULES.get(function)
        found = NotImplemented if rule is None else rule(self, *args, **kwargs)
        return self._elementwise(function, args, kwargs) if found is NotImplemented else found

    def _elementwise(self, function: Any, args: Any, kwargs: Any) -> Any:
        """An operation number by number: of a batch and a hidden value it is a batch."""
        name = getattr(function, "__name__", str(function))
        if name not in _ELEMENTWISE:
            raise NotCompilableError(f"a perturbed parameter is used in {name}(), for which there is no compiled rule")
        values = [self.hidden(value) for value in args]
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        batch = [value for value in tensors if value.shape[0] == self._size]
        ndim = max(
            [value.inner.ndim - 1 for value in values if isinstance(value, Hidden)] + [value.ndim for value in tensors]
        )
        aligned = [self._aligned(value, ndim, bool(batch)) if isinstance(value, Hidden) else value for value in values]
        found = function(*aligned, **kwargs)
        return found if batch else Hidden(found)

    def _aligned(self, value: Hidden, ndim: int, batch: bool) -> Tensor:
        """A hidden value that broadcasts against a batch, or against other hidden values, of ``ndim`` dimensions."""
        shape = tuple(value.inner.shape[1:])
        padded = (1,) * (ndim - len(shape)) + shape
        if not batch:
            return value.inner.reshape(self._size, *padded)
        if padded[0] != 1:
            raise NotCompilableError("a value that differs between the instances is combined with a batch across it")
        return value.inner.reshape(self._size, *padded[1:])

    def hidden(self, value: Any) -> Any:
        """A parameter as a value of every instance; anything else as it is."""
        if isinstance(value, Weight):
            return Hidden(self.values(value).to(value.value.dtype))
        return value

    # -- what the rules need -------------------------------------------------------------------------------------

    def layout(self, x: Any, weight: Weight, features: int) -> Layout:
        """The layout of an input of the layer of a parameter, as the proxies find it."""
        if isinstance(x, Hidden):
            lead = tuple(x.inner.shape[1 : x.inner.ndim - features])
            return Layout("hidden", self._size, self._table, lead)
        return find_layout(x, features, self._size, self._table, weight.name)

    def split(self, x: Any, layout: Layout, features: int) -> Tensor:
        """An input as (N, S, *features)."""
        if isinstance(x, Hidden):
            return x.inner.reshape(self._size, -1, *x.inner.shape[x.inner.ndim - features :])
        return layout.split(x, features)

    def join(self, y: Tensor, layout: Layout) -> Any:
        """An output (N, S, *features) in the layout of the model."""
        if layout.kind in ("shared", "hidden"):
            return Hidden(y.reshape(self._size, *layout.lead, *y.shape[2:]))
        return layout.join(y)

    def tapped(self, y: Tensor, call: PlannedCall, inputs: Tensor | None) -> Tensor:
        """The output of a call, which is recorded."""
        if self._perturbation is not None:
            return y
        if inputs is not None:
            if id(inputs) not in self._numbers:
                self._numbers[id(inputs)] = len(self.inputs)
                self.inputs.append(inputs)
            call = call._replace(inputs=self._numbers[id(inputs)])
        if self._given is None:
            tap = torch.zeros((), dtype=y.dtype, device=y.device).expand(y.shape).requires_grad_()
        else:
            tap = self._given[len(self.taps)]
        self.calls.append(call)
        self.taps.append(tap)
        tapped: Tensor = _Tap.apply(y, tap)  # type: ignore[no-untyped-call]
        return tapped

    def values(self, weight: Weight) -> Tensor:
        """The parameter of every instance, (N, *shape), in float32 at least; computed once."""
        if weight.name not in self._values:
            value = weight.value
            if self._perturbation is not None:
                wide = self._perturbation.values(value)
            else:
                wide = value.to(wide_dtype(value.dtype)).unsqueeze(0).expand(self._size, *value.shape)
                wide = self.tapped(wide, PlannedCall(weight.name, None, None, "dense"), None)
            self._values[weight.name] = wide
        return self._values[weight.name]

    def rows(self, x: Any, layout: Layout) -> tuple[Tensor, Tensor]:
        """Inputs as (G, S, in), in the precision of autocast, and the same without a graph."""
        if self._rows_of is None or self._rows_of[0] is not x:
            source = x.inner if isinstance(x, Hidden) else x
            kind = source.device.type
            if torch.is_autocast_enabled(kind) and source.dtype is not torch.float64:
                source = source.to(torch.get_autocast_dtype(kind))
            inside = Hidden(source) if isinstance(x, Hidden) else source
            rows = self._grouping.rows(self.split(inside, layout, 1))
            self._rows_of = (x, rows, rows.detach())
        return self._rows_of[1:]

    def matrix(self, x: Any, weight: Weight, bias: Any, matrix: Tensor, *, transposed: bool) -> Any:
        """``x matrix^T + bias``; the matrix is the weight, transposed if it is stored so."""
        x = self.hidden(x)
        layout = self.layout(x, weight, 1)
        rows, recorded = self.rows(x, layout)
        offset = bias.value if isinstance(bias, Weight) else None
        plain = offset if isinstance(bias, Weight) else bias
        perturbation = self._perturbation
        move = None
        if perturbation is not None and rows.dtype in (torch.bfloat16, torch.float16) and layout.kind != "shared":
            move = perturbation.linear_move(weight.value, offset, rows, matrix.shape[0], transposed)
        if move is not None:
            y = add_to_linear(move, rows, matrix)
            y = y if plain is None else y + plain.to(y.dtype)
        else:
            if layout.kind == "shared":
                once = F.linear(x.reshape(1, -1, x.shape[-1]), matrix, plain)
                y = self._grouping.rows(once.expand(self._size, -1, -1).contiguous())
            else:
                y = F.linear(rows, matrix, plain)
            if perturbation is not None:
                y = perturbation.linear(weight.value, offset, rows, y, transposed)
        name = bias.name if isinstance(bias, Weight) else None
        y = self.tapped(y, PlannedCall(weight.name, name, None, "matrix", transposed), recorded)
        return self.join(self._grouping.unrows(y), layout)

    def norm(self, x: Any, weight: Any, bias: Any, normal: Normal, features: int, whole: Callable[..., Tensor]) -> Any:
        """``normal(x)``, scaled and shifted; ``whole(x, weight, bias)`` is all of it."""
        if isinstance(x, Weight) or not isinstance(weight, Weight) or (bias is not None and type(bias) is not Weight):
            raise NotCompilableError("a norm has a scale or a shift that is not perturbed")
        offset = None if bias is None else bias.value
        layout = self.layout(x, weight, features)
        if self._perturbation is None and not isinstance(x, Hidden) and layout.kind != "shared":
            grouping = self._grouping

            def arrange(tensor: Tensor) -> Tensor:
                return grouping.rows(layout.split(tensor, features))

            name = None if bias is None else bias.name
            call = PlannedCall(weight.name, name, None, "norm", normal=normal, arrange=arrange)
            return self.tapped(whole(x, weight.value, offset), call, x.detach())
        inner = Hidden(normal(x.inner)) if isinstance(x, Hidden) else normal(x)
        rows = self.split(inner, layout, features)
        scale, shift = self._vector(weight), None if bias is None else self._vector(bias)
        moved = rows * scale if shift is None else torch.addcmul(shift, rows, scale)
        return self.join(moved.to(rows.dtype), layout)

    def _vector(self, weight: Weight) -> Tensor:
        """A scale or shift of every instance as (N, 1, *shape)."""
        vector = None if self._perturbation is None else self._perturbation.as_rows(weight.value)
        return self.values(weight).unsqueeze(1) if vector is None else vector

    def lookup(self, ids: Tensor, weight: Weight, padding_idx: int | None) -> Any:
        """The rows ``ids`` of a table."""
        layout = find_layout(ids, 0, self._size, self._table, weight.name)
        split = layout.split(ids.unsqueeze(-1) if ids.ndim == 0 else ids, 0)
        rows = self._grouping.rows(split.unsqueeze(-1)).squeeze(-1)
        if layout.kind == "shared":
            once = F.embedding(split[:1], weight.value, padding_idx)
            y = self._grouping.rows(once.expand(self._size, -1, -1))
        else:
            y = F.embedding(rows, weight.value, padding_idx)
        if self._perturbation is not None:
            y = self._perturbation.rows(weight.value, rows, y)
        padding = None if padding_idx is None else padding_idx % weight.value.shape[0]
        y = self.tapped(y, PlannedCall(weight.name, None, None, "rows", padding=padding), rows)
        return self.join(self._grouping.unrows(y), layout)


# -- the rules: called with the interpreter and the arguments of the operation ----------------------------------------


def _linear(run: InstanceInterpreter, x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, Weight):
        return run.matrix(x, weight, bias, weight.value, transposed=False)
    if isinstance(weight, Hidden) or isinstance(x, Weight):
        return NotImplemented
    y: Any = Hidden(F.linear(x.inner, weight)) if isinstance(x, Hidden) else F.linear(x, weight)
    return y if bias is None else run.call_function(operator.add, (y, bias), {})


def _addmm(run: InstanceInterpreter, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if not isinstance(weight, Weight) or isinstance(bias, Hidden) or beta != 1 or alpha != 1:
        return NotImplemented
    if (bias.value if isinstance(bias, Weight) else bias).ndim != 1:
        return NotImplemented
    return run.matrix(x, weight, bias, weight.value.t(), transposed=True)


def _matmul(run: InstanceInterpreter, x: Any, weight: Any) -> Any:
    if not isinstance(weight, Weight) or weight.value.ndim != 2 or not isinstance(x, Tensor) or x.ndim < 2:
        return NotImplemented
    return run.matrix(x, weight, None, weight.value.t(), transposed=True)


def _embedding(
    run: InstanceInterpreter,
    ids: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, Weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return run.lookup(ids, weight, padding_idx)


def _layer_norm(
    run: InstanceInterpreter, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    normal = Normal(torch.layer_norm, (tuple(shape), None, None, eps))
    return run.norm(x, weight, bias, normal, len(shape), lambda x, w, b: torch.layer_norm(x, shape, w, b, eps))


def _rms_norm(run: InstanceInterpreter, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    normal = Normal(torch.rms_norm, (tuple(shape), None, eps))
    return run.norm(x, weight, None, normal, len(shape), lambda x, w, b: torch.rms_norm(x, shape, w, eps))


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    Tensor.matmul: _matmul,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
