"""What the rules work with during one forward pass: the layout of inputs, the perturbation, and the recorded calls."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deltasam._torch import base_of, version_of
from deltasam.per_instance.algebra.calls import Call, Normal
from deltasam.per_instance.algebra.factors import wide_dtype
from deltasam.per_instance.algebra.grouping import Grouping
from deltasam.per_instance.algebra.layers import perturbed_linear
from deltasam.per_instance.algebra.operations import add_to_linear
from deltasam.per_instance.algebra.perturbation import Perturbation
from deltasam.per_instance.errors import NoRuleError
from deltasam.per_instance.interception.batch_rule import Kind
from deltasam.per_instance.interception.layout import Layout, find_layout
from deltasam.per_instance.interception.memory import Memory
from deltasam.per_instance.interception.row_moves import CHOOSING, moves_between, rows_taken
from deltasam.per_instance.interception.tensors import PerInstance, Proxy, unwrapped

_MOST_LAYOUTS = 20_000  # to remember: some hundred parameters times the lengths of texts


class PassState:
    """One forward pass that records the calls, or at w + eps_i (``perturbation``), or both.

    ``names`` are those of the perturbed parameters by ``id``; ``memory`` is what earlier passes learned.
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
        self.layout_table = memory.layout_table
        self.layout_table.seen = {}
        self._memory = memory
        self.perturbation = perturbation
        self.recording = recording
        self.differentiated = recording  # as long as the pass lasts; recording ends before the backward
        self.calls: list[Call] = []
        self.layouts: list[Layout | None] = []  # of the inputs of the calls; None for a parameter written out
        self.together: set[int] = set()  # parameters (``id``) with a use that cannot take one matrix per group
        self.chosen: set[int] = set()  # parameters (``id``) with an input whose rows the model may choose by content
        # Inputs that rows may reach from layers of other instances, and the operations that may have moved them.
        self.crossings: list[tuple[Tensor, Layout, set[Any]]] = []
        self._moves: set[Any] = set()  # all of these operations
        self._noted: set[Hashable] = set()  # which inputs these are; the layout of one is asked for more than once
        self._ends: set[Any] = set()  # nodes of the graph at which the gradients of the first calls arrive
        self._counted = 0  # the number of these calls
        self._known_rows = {grouping.size}  # numbers of rows that follow from shapes: N, N T, N C T
        self._dtypes: dict[int, torch.dtype] = {}  # of the inputs of parameters that are used as matrices
        # By parameter, and whether there is a graph: a value that was computed without one has no gradient.
        self._values: dict[tuple[int, bool], Tensor] = {}
        self._expanded: dict[tuple[int, bool], Tensor] = {}
        self._cast: tuple[Tensor, tuple[bool, int], Tensor] | None = None
        self._last: tuple[Tensor, tuple[Kind, bool, int], Tensor, Tensor] | None = None
        self.size = grouping.size

    def layout(self, tensor: Tensor, parameter: Proxy, features: int) -> Layout:
        """The layout of an input of ``parameter``'s layer."""
        name = self.names[id(parameter.parameter)]
        known = (name, tensor.shape, features, type(tensor) is PerInstance, self.size)
        layout = self._memory.layouts.get(known)
        if layout is None:
            if len(self._memory.layouts) > _MOST_LAYOUTS:
                self._memory.layouts.clear()
            layout = self._memory.layouts[known] = find_layout(tensor, features, self.size, self.layout_table, name)
        if self.recording and layout.place is not None:
            self.layout_table.note(layout.place, layout.kind)
            if not self._rows_follow_from_shapes(tensor, layout.lead):
                self.chosen.add(id(parameter.parameter))
            elif layout.kind != "shared" and tensor.grad_fn is not None:
                self._note_crossing(tensor, layout, known)
        return layout

    def note_losses(self, losses: Tensor, objective: Hashable) -> None:
        """Remembers the losses, (N,), if an operation between them and the last layers can move rows.

        Not if it takes N of N rows, such as the pooling of a causal model: with groups of one their order does not
        matter after the last layer, and a test would wait for the device in every step.
        """
        if losses.grad_fn is not None:
            layout = Layout("batch", self.size, self.layout_table, (self.size,))
            self._note_crossing(losses, layout, (objective, losses.shape, self.grouping.m), last=self.grouping.m == 1)

    def _note_crossing(self, tensor: Tensor, layout: Layout, known: Hashable, *, last: bool = False) -> None:
        """Remembers an input with an operation between it and earlier layers that can move rows.

        The first input behind such an operation is enough: later ones see the same rows. The graph is searched once
        for each input of a layer; later passes repeat the operations.
        """
        what, straight = (known, len(self.calls)), self._memory.straight
        if what in straight or what in self._noted:
            return
        self._ends.update(call.edge.node for call in self.calls[self._counted :])
        self._counted = len(self.calls)
        moves = moves_between(tensor, self._ends) - self._moves
        if last:
            moves = {node for node in moves if rows_taken(node, self.size) is None}
        if moves:
            self.crossings.append((tensor, layout, moves))
            self._moves |= moves
            self._noted.add(what)
        else:
            if len(straight) > _MOST_LAYOUTS:
                straight.clear()
            straight.add(what)

    def _rows_follow_from_shapes(self, tensor: Tensor, lead: tuple[int, ...]) -> bool:
        """Whether the rows of an instance are where they are in every batch of these shapes.

        True for (N, ...), for as many rows as such a tensor has if flattened, for views of one, and for ids (k N, T),
        which are texts of the caller. False for rows that an operation has just chosen.
        """
        rows, known = lead[0], self._known_rows
        node = tensor.grad_fn
        if node is not None and node.name() in CHOOSING:
            return False
        if rows not in known:
            base = base_of(tensor)
            is_view = base is not None and base.shape[:1] == (self.size,) and base.numel() == tensor.numel()
            if not is_view and (tensor.is_floating_point() or len(lead) < 2):
                return False
            known.add(rows)
        for length in lead[1:]:
            rows *= length
            known.add(rows)
        return True

    def is_split(self, tensor: Tensor, parameter: Proxy) -> bool:
        """Whether an input of ``parameter``'s layer is ``(N, S, features)`` already, for groups of one."""
        if self.layout_table.shared:
            return self.layout(tensor, parameter, 1).is_split
        return tensor.ndim == 3 and tensor.shape[0] == self.size  # the rule

    @property
    def is_half(self) -> bool:
        """Whether a layer computed in half precision."""
        return not {torch.float16, torch.bfloat16}.isdisjoint(self._dtypes.values())

    def refuse(self, operation: str, *parameters: Any) -> NoReturn:
        """Raises the error that makes the engine fall back to the loop."""
        raise NoRuleError(operation, [self.names[id(p.parameter)] for p in parameters if isinstance(p, Proxy)])

    def data(self, x: Tensor) -> Tensor:
        """An input of a layer; a parameter that serves as one (DeBERTa's relative positions) is written out."""
        return self.expanded(x) if isinstance(x, Proxy) else x

    def rows(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Inputs as ``(G, S, in)``, and the same detached if they are recorded.

        They are cast once under autocast, and computed once while the same input goes through several layers.
        """
        last, how = self._last, (layout.kind, torch.is_grad_enabled(), version_of(x))  # x may be changed in place
        if last is None or last[0] is not x or last[1] != how:
            source = self.cast(x.inner if type(x) is PerInstance else x)
            inside = PerInstance.wrap(source, self.layout_table) if type(x) is PerInstance else source
            rows = inside if layout.is_split and self.grouping.m == 1 else self.grouping.rows(layout.split(inside, 1))
            self._last = last = (x, how, rows, rows.detach() if self.recording else rows)
        return last[2], last[3]

    def cast(self, x: Tensor) -> Tensor:
        """The input of a matrix product, in the dtype of autocast if that is on; one copy for several layers."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
            return x
        last, how = self._cast, (torch.is_grad_enabled(), version_of(x))
        if last is None or last[0] is not x or last[1] != how:
            self._cast = last = (x, how, x.to(torch.get_autocast_dtype(kind)))
        return last[2]

    def noted(self, weight: Tensor, bias: Tensor | None, y: Tensor, recorded: Tensor, layout: Layout) -> Tensor:
        """As :meth:`recorded` for the output of ``F.linear`` itself, whose base it covers."""
        if self.recording:
            if self._dtypes.setdefault(id(weight), recorded.dtype) is not recorded.dtype:
                self.together.add(id(weight))
            base = base_of(y)
            node = y.grad_fn if base is None else base.grad_fn
            if node is not None:
                self.calls.append(Call(weight, bias, recorded, GradientEdge(node, 0), "matrix"))
                self.layouts.append(layout)
        return y

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
        if self.perturbation is not None:
            y = self.perturbation.linear(weight.parameter, _parameter(bias), x, y, transposed)
        return self.recorded(weight, bias, y, recorded, layout, transposed)

    def linear(
        self,
        weight: Proxy,
        bias: Any,
        x: Tensor,
        matrix: Tensor,
        recorded: Tensor,
        layout: Layout,
        transposed: bool = False,
    ) -> Tensor:
        """The layer ``x matrix^T + bias``, (G, S, out); the matrix is the weight, transposed if it is stored so."""
        own = type(x) is Tensor and self._dtypes.setdefault(id(weight.parameter), x.dtype) is x.dtype
        perturbation = self.perturbation
        if perturbation is not None and own:
            offset = unwrapped(bias)
            made = perturbation.own_product(weight.parameter, _parameter(bias), x, matrix, offset, transposed)
            if made is not None:
                return self.recorded(weight, bias, made, recorded, layout, transposed, own=own)
        if perturbation is not None and type(x) is Tensor:
            known = perturbation.low_rank(weight.parameter, _parameter(bias), transposed)
            if known is not None:
                products, is_eager = perturbation.products, perturbation.is_eager
                y = perturbed_linear(x, matrix, unwrapped(bias), *known, products, is_eager=is_eager)
                return self.recorded(weight, bias, y, recorded, layout, transposed, own=own)
        if perturbation is not None and x.dtype in (torch.bfloat16, torch.float16):
            move = perturbation.linear_move(weight.parameter, _parameter(bias), x, matrix.shape[0], transposed)
            if move is not None:
                y = add_to_linear(move, x, matrix)
                y = y if bias is None else y + unwrapped(bias).to(y.dtype)
                return self.recorded(weight, bias, y, recorded, layout, transposed, own=own)
        y = F.linear(x, matrix, unwrapped(bias))
        if perturbation is not None:
            y = perturbation.linear(weight.parameter, _parameter(bias), x, y, transposed)
        return self.recorded(weight, bias, y, recorded, layout, transposed, own=own)

    def recorded(
        self,
        weight: Proxy,
        bias: Any,
        y: Tensor,
        recorded: Tensor,
        layout: Layout,
        transposed: bool = False,
        own: bool = False,
    ) -> Tensor:
        """The output ``y`` of a layer, whose inputs ``recorded`` and edge are recorded.

        ``own``: whether the perturbed layer could multiply with one matrix per group.
        """
        if not own:
            self.together.add(id(weight.parameter))
        if self.recording and (edge := edge_of(whole_base(y))) is not None:
            self.calls.append(Call(weight.parameter, _parameter(bias), recorded, edge, "matrix", transposed))
            self.layouts.append(layout)
        return y

    def table(self, weight: Proxy, ids: Tensor, y: Tensor, layout: Layout, padding: int | None) -> Tensor:
        """Output ``y`` (G, S, out) of a lookup of ``ids`` (G, S)."""
        self.together.add(id(weight.parameter))
        if self.perturbation is not None:
            y = self.perturbation.rows(weight.parameter, ids, y)
        if self.recording and (edge := edge_of(y)) is not None:
            self.calls.append(Call(weight.parameter, None, ids, edge, "rows", padding=padding))
            self.layouts.append(layout)
        return y

    def norm_layout(self, x: Tensor, weight: Any, bias: Any) -> Layout | None:
        """The layout of a norm's input if :meth:`norm` can record it, which is cheaper; else None."""
        if self.perturbation is not None or type(x) is PerInstance or not isinstance(weight, Proxy):
            return None
        if bias is not None and not isinstance(bias, Proxy):
            return None
        found = self.layout(x, weight, weight.parameter.ndim)
        return None if found.kind == "shared" else found

    def norm(self, weight: Proxy, bias: Any, x: Tensor, y: Tensor, layout: Layout, normal: Normal) -> Tensor:
        """Output ``y``, at w, of a layer that scales and shifts ``normal(x)``; its gradient is computed later."""
        if self.recording and (edge := edge_of(y)) is not None:
            offset = None if bias is None else bias.parameter
            arrange = None
            if not layout.is_split or self.grouping.m > 1:
                features, grouping = weight.parameter.ndim, self.grouping

                def arrange(tensor: Tensor) -> Tensor:  # without self, which holds the calls: that would be a cycle
                    return grouping.rows(layout.split(tensor, features))

            self.calls.append(Call(weight.parameter, offset, x.detach(), edge, "norm", normal=normal, arrange=arrange))
            self.layouts.append(layout)
        return y

    def values(self, proxy: Proxy) -> Tensor:
        """The parameter of every instance, ``(N, *shape)``, written out, in float32 at least: for small parameters."""
        parameter = proxy.parameter
        self.together.add(id(parameter))
        name = (id(parameter), torch.is_grad_enabled())
        if name not in self._values:  # computed once in a pass, so that one gradient collects all uses
            if self.perturbation is None:
                wide = parameter.to(wide_dtype(parameter.dtype)).unsqueeze(0).expand(self.size, *parameter.shape)
            else:
                wide = self.perturbation.values(parameter)
            if self.recording and (edge := edge_of(wide)) is not None:
                self.calls.append(Call(parameter, None, None, edge, "dense"))
                self.layouts.append(None)
            self._values[name] = wide
        return self._values[name]

    def expanded(self, proxy: Proxy) -> Tensor:
        """The parameter of every instance as a tensor that the model can use in any operation."""
        name = (id(proxy.parameter), torch.is_grad_enabled())
        if name not in self._expanded:
            self._expanded[name] = PerInstance.wrap(self.values(proxy).to(proxy.dtype), self.layout_table)
        return self._expanded[name]


def _parameter(value: Any) -> Tensor | None:
    return value.parameter if isinstance(value, Proxy) else None


def edge_of(output: Tensor) -> GradientEdge | None:
    """Where the gradient of an output arrives (``get_gradient_edge`` without its checks); None without a graph."""
    node = output.grad_fn
    return None if node is None else GradientEdge(node, output.output_nr)


def whole_base(output: Tensor) -> Tensor:
    """The tensor that an output is a view of, if the view covers all of it in the same order; else the output itself.

    ``F.linear`` with a bias returns such a view. If it is changed in place, the gradient arrives at the base only.
    If it was computed inside a ``torch.autograd.Function`` (bitsandbytes), the base is not part of the graph.
    """
    base = base_of(output)
    if base is None or base.grad_fn is None:
        return output
    whole = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if whole else output
