"""Uses of a parameter beside those that the engine sees, which its gradient alone does not show.

Autograd differentiates what a pass with proxies has computed. A use that is not in that graph, or that adds little to
the gradient of the compared groups, is found by the structure of two graphs: of the pass with proxies, and of a plain
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from deltasam.per_instance.errors import UncoveredError
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.row_moves import nodes_before
from deltasam.per_instance.interception.rules import has_own_rules
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import CheckResult, and_more, describe
from deltasam.per_instance.verification.plain_pass import Run, plain_losses
from deltasam.step.gradients import graph_of, nodes_behind, refuse_reentrant


class FunctionCall(NamedTuple):
    """A ``torch.autograd.Function`` in a graph."""

    name: str
    inputs: tuple[bool, ...]  # which of them have a gradient


def refuse_direct_uses(slots: ParameterSlots, losses: Tensor, state: PassState) -> None:
    """Raises UncoveredError if the losses depend on a parameter by another way than the recorded calls.

    The derivative of a model by its inputs (a gradient penalty) is computed with the weights themselves.
    """
    ends = {call.edge.node for call in state.calls}
    reached = _variables(nodes_before(losses, ends))
    if used := [name for number, name in slots.names.items() if number in reached]:
        raise UncoveredError(
            "the losses contain a derivative of the model (torch.autograd.grad with create_graph=True), or use "
            f"{and_more(used)} by a reference from outside the model, and the low-rank engine sees neither: if it is "
            "the reference, read the weight from its module",
            used,
        )


def function_calls(losses: Tensor) -> Counter[FunctionCall]:
    """The Python functions in the graph of the losses, and how often they occur."""
    return Counter(map(_call, _functions(graph_of(losses))))


def passes_compare(slots: ParameterSlots, run: Run, check: CheckResult, calls: Counter[FunctionCall]) -> bool:
    """Raises UncoveredError if a parameter has more of a gradient without proxies.

    A ``torch.autograd.Function`` silently treats a proxy as a constant: its call then lacks an input with a gradient,
    or has no gradient at all. Returns False for a model that uses different parameters in every pass, so that passes
    cannot be compared. Costs a forward.

    Args:
        slots: The parameters.
        run: Makes the pass once more.
        check: The group that was compared.
        calls: The :func:`function_calls` of the pass with proxies.
    """
    if slots.is_sharded:
        return True
    losses = plain_losses(slots.model, run)
    refuse_reentrant(losses)
    nodes = graph_of(losses)
    reached = _variables(nodes)
    has_gradient = {name: g is not None for name, g in zip(slots.compared, check.gradients, strict=True)}
    if not all(id(p) in reached for name, p in slots.compared.items() if has_gradient[name]):
        return False
    cut_off = _variables(nodes_behind(*_lost_inputs(_functions(nodes), calls)))
    cut_off |= {id(p) for name, p in slots.compared.items() if id(p) in reached and not has_gradient[name]}
    if missed := [name for name, p in slots.params.items() if id(p) in cut_off]:
        raise UncoveredError(describe(slots.model, missed, "a torch.autograd.Function"), missed)
    return True


def _lost_inputs(functions: Sequence[Any], calls: Counter[FunctionCall]) -> list[Any]:
    """The nodes from which these functions get inputs that have no gradient in the ``calls`` of another pass.

    A rule of the user may stand for a whole function.
    """
    here = Counter(map(_call, functions))
    more, fewer = here - calls, calls - here
    lost = []
    for node in functions:
        call = _call(node)
        others = [other.inputs for other in fewer if other.name == call.name]
        if call not in more or (not others and has_own_rules()):
            continue
        kept = [all(each) for each in zip(*others, strict=False)] or [False] * len(call.inputs)
        lost += [end for (end, _), is_kept in zip(node.next_functions, kept, strict=False) if not is_kept]
    return lost


def _functions(nodes: Iterable[Any]) -> list[Any]:
    return [node for node in nodes if isinstance(node, BackwardCFunction)]


def _call(node: Any) -> FunctionCall:
    return FunctionCall(node.name(), tuple(end is not None for end, _ in node.next_functions))


def _variables(nodes: Iterable[Any]) -> set[int]:
    """The ``id`` of the leaves among the nodes."""
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}
