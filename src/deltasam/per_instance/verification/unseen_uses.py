"""Uses of a parameter beside those that the engine sees, which its gradient alone does not show.

Autograd differentiates what a pass with proxies has computed. A use that is not in that graph, or that adds little to
the gradient of the compared groups, is found by the structure of two graphs: of the pass with proxies, and of a plain
one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from deltasam.per_instance.errors import UncoveredError
from deltasam.per_instance.interception.pass_state import PassState
from deltasam.per_instance.interception.row_moves import nodes_before
from deltasam.per_instance.interception.slots import ParameterSlots
from deltasam.per_instance.verification.comparison import CheckResult, Scale, describe, far_apart
from deltasam.per_instance.verification.plain_pass import Run, plain_losses
from deltasam.step.gradients import graph_of, refuse_reentrant


def refuse_direct_uses(slots: ParameterSlots, losses: Tensor, state: PassState) -> None:
    """Raises UncoveredError if the losses depend on a parameter by another way than the recorded calls.

    The derivative of a model by its inputs (a gradient penalty) is computed with the weights themselves.
    """
    ends = {call.edge.node for call in state.calls}
    reached = {id(node.variable) for node in nodes_before(losses, ends) if hasattr(node, "variable")}
    if used := [name for number, name in slots.names.items() if number in reached]:
        raise UncoveredError(
            f"the losses contain a derivative of the model (torch.autograd.grad with create_graph=True), or use "
            f"{used[0]} by a reference from outside the model, which the low-rank engine does not see",
            used,
        )


def passes_compare(slots: ParameterSlots, run: Run, losses: Tensor, check: CheckResult, scale: Scale | None) -> bool:
    """Raises UncoveredError if a parameter has more of a gradient without proxies.

    A ``torch.autograd.Function`` silently treats a proxy as a constant. Returns False for a model that uses different
    parameters in every pass, so that passes cannot be compared. Costs a forward; a backward for models with such
    functions.

    Args:
        slots: The parameters.
        run: Makes the pass once more.
        losses: Those of the pass with proxies, (N,).
        check: The group that was compared.
        scale: Loss scaling.
    """
    if slots.is_sharded:
        return True
    again = plain_losses(slots.model, run)
    refuse_reentrant(again)
    nodes = graph_of(again)
    reached = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    gradients = dict(zip(slots.compared, check.gradients, strict=True))
    missed = [name for name, p in slots.compared.items() if id(p) in reached and gradients[name] is None]
    same = all(id(p) in reached for name, p in slots.compared.items() if gradients[name] is not None)
    if same and not missed and check.group >= 0 and any(isinstance(node, BackwardCFunction) for node in nodes):
        missed = _different(slots, again, losses, check, scale)
    if missed and same:
        raise UncoveredError(describe(slots.model, missed, "a torch.autograd.Function"), missed)
    return same


def _different(
    slots: ParameterSlots, again: Tensor, losses: Tensor, check: CheckResult, scale: Scale | None
) -> list[str]:
    """The parameters whose gradient in the plain pass is another one; none if the passes drew other numbers."""
    precisions = {losses.dtype, *(p.dtype for p in slots.compared.values())}
    if check.is_half:
        precisions.add(torch.bfloat16)
    own, plain = losses[check.members], again[check.members]
    if far_apart(["losses"], [torch.stack([(own - plain.detach()).norm(), own.norm()]).float()], precisions)[0]:
        return []
    total = plain.sum() if scale is None else scale(plain.sum())
    exact = torch.autograd.grad(total, list(slots.compared.values()), allow_unused=True)
    rows = []
    for p, mine, other in zip(slots.compared.values(), check.gradients, exact, strict=True):
        one, two = (torch.zeros_like(p) if g is None else g.to_dense() for g in (mine, other))
        rows.append(torch.stack([(one - two).norm(), two.norm()]).float())
    return far_apart(slots.compared, rows, precisions)[0]
