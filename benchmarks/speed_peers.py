"""Steps of SAM from other packages and written by hand, as candidates of ``deltasam.lab.bench``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from deltasam.lab.bench import Candidate

RHO = 0.05


class TwoSteps:
    """SAM of davda54's kind: a loop over the parameters for each of its two steps, and copies of the weights."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **options: Any) -> None:
        self.params = list(params)
        self.base = base(self.params, **options)
        self.old: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.params if p.grad is not None]).norm()
        scale = RHO / (norm + 1e-12)
        for p in self.params:
            if p.grad is not None:
                self.old[p] = p.data.clone()
                p.add_(p.grad * scale)
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data = self.old[p]
        self.base.step()
        self.base.zero_grad()


def _backward(bench: Any, model: Any) -> torch.Tensor:
    with bench.precision():
        loss = bench.objective(model, bench.batch).mean()
    loss.backward()
    return loss


def _two_steps(bench: Any, optimizer: Any) -> Callable[[], None]:
    model = copy.deepcopy(bench.model)  # its weights change their addresses, which a captured step would notice
    sam = TwoSteps(model.parameters(), optimizer.kind, **optimizer.options)

    def work() -> None:
        _backward(bench, model)
        sam.first_step()
        _backward(bench, model)
        sam.second_step()

    return work


def _pytorch_optimizer(bench: Any, optimizer: Any) -> Callable[[], None]:
    kind = import_module("pytorch_optimizer").SAM  # where it is missing, the error is recorded
    sam = kind(bench.model.parameters(), optimizer.kind, rho=RHO, **optimizer.options)

    def work() -> None:
        _backward(bench, bench.model)
        sam.step(lambda: _backward(bench, bench.model))
        sam.zero_grad()

    return work


def _by_hand(bench: Any, optimizer: Any, model: Any) -> Callable[[], None]:
    """The least that SAM takes on the host: two passes, and five operations over all parameters at once."""
    params = [p for p in bench.model.parameters() if p.requires_grad]
    stepper = optimizer.over(bench.model)

    def work() -> None:
        _backward(bench, model)
        with torch.no_grad():
            grads, moved = zip(*[(p.grad, p) for p in params if p.grad is not None], strict=True)
            scale = RHO / torch.stack(torch._foreach_norm(grads)).norm()
            old = [p.clone() for p in moved]
            torch._foreach_add_(moved, torch._foreach_mul(grads, scale))
        stepper.zero_grad()
        _backward(bench, model)
        with torch.no_grad():
            torch._foreach_copy_(moved, old)
        stepper.step()
        stepper.zero_grad()

    return work


BY_HAND = Candidate(
    "SAM by hand compiled",
    "third_party",
    build=lambda bench, optimizer: _by_hand(bench, optimizer, bench.compiled()),
    build_eager=lambda bench, optimizer: _by_hand(bench, optimizer, bench.model),  # hooks would compile once more
)
PEERS = (
    Candidate("pytorch_optimizer.SAM", "third_party", _pytorch_optimizer),
    Candidate("SAM of davda54's kind", "third_party", _two_steps),
)
