"""Measures norm, perturb and restore alone: the cost of a SAM step without its two passes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import util

import torch
from torch import Tensor

from deltasam.lab.bench._clock import interleaved
from deltasam.lab.bench._workbench import NoStep, Workbench
from deltasam.lab.bench.options import StepOptions
from deltasam.step.moving import perturbed
from deltasam.step.norms import global_norm, step_size

RHO = 0.05
OURS = "deltasam"
THEIRS = "pytorch_optimizer.SAM"


def run(options: StepOptions, bench: Workbench) -> dict[str, list[float]]:
    """Returns the seconds of norm + perturb + restore, by implementation and round. Each call gets a new gradient.

    Raises:
        RuntimeError: An implementation did not restore the weights.
    """
    params = [p for p in bench.model.parameters() if p.requires_grad]
    gradient = [torch.randn_like(p) for p in params]
    before = [p.detach().clone() for p in params]
    works: dict[str, Callable[[], None]] = {OURS: lambda: _ours(params)}
    if options.third_party and util.find_spec("pytorch_optimizer") is not None:
        works |= {THEIRS: _theirs(params, foreach=False), f"{THEIRS}(foreach=True)": _theirs(params, foreach=True)}

    def fresh_gradient() -> None:
        # A backward pass creates a new gradient in every step; this is not part of the perturbation.
        for p, g in zip(params, gradient, strict=True):
            p.grad = g.clone()

    seconds = interleaved(
        works,
        rounds=options.rounds,
        warmup=options.warmup,
        clock=options.clock,
        synchronize=bench.synchronize,
        prepare=fresh_gradient,
    )
    if not all(torch.equal(p, w) for p, w in zip(params, before, strict=True)):
        raise RuntimeError(f"one of {', '.join(works)} did not restore the weights exactly")
    bench.model.zero_grad()
    return seconds


def _ours(params: list[torch.nn.Parameter]) -> None:
    grads: list[Tensor | None] = [p.grad for p in params]
    for p in params:
        p.grad = None  # as after autograd.grad
    norm = global_norm([g for g in grads if g is not None])
    with perturbed(params, grads, step_size(RHO, norm)):
        pass


def _theirs(params: list[torch.nn.Parameter], *, foreach: bool) -> Callable[[], None]:
    from pytorch_optimizer import SAM

    optimizer = SAM(params, NoStep, rho=RHO, foreach=foreach)

    def work() -> None:
        optimizer.first_step()
        optimizer.second_step()

    return work
