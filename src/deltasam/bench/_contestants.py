"""Who takes part: every method of this package, and the implementations of others that are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any, Literal

import torch

from deltasam.bench._workbench import Workbench
from deltasam.methods import ERM, SAM, Method
from deltasam.methods.catalogue import METHODS, find_method

Work = Callable[[], None]
PERIODS = ("k", "probe_every")  # the hyperparameters by which a method says how often it takes its expensive step


@dataclass(frozen=True)
class Optimizer:
    """The optimizer behind every contestant. A learning rate of zero lets all of them see the same weights."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]

    def over(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer over the model's parameters."""
        return self.kind(model.parameters(), **self.options)


ADAMW = Optimizer(torch.optim.AdamW, {"lr": 0.0})
# No state and no temporaries: memory measured with it is the method's own.
BARE_SGD = Optimizer(torch.optim.SGD, {"lr": 0.0, "foreach": False})


@dataclass(frozen=True)
class Contestant:
    """One row of the table: ``build`` makes a function that takes one training step, optimizer included."""

    name: str
    origin: Literal["deltasam", "field"]
    build: Callable[[Workbench, Optimizer], Work]
    period: int = 1  # steps until the costs repeat; a method with a rare expensive step is timed over a whole period


def contestants(names: tuple[str, ...], *, with_field: bool) -> list[Contestant]:
    """ERM, SAM and the named methods (all if none is named), then the installed packages of others."""
    wanted = [find_method(name) for name in names] or METHODS.values()
    ours = [of_method(kind) for kind in dict.fromkeys((ERM, SAM, *wanted))]
    return ours + (field() if with_field else [])


def of_method(make: Callable[[], Method], name: str | None = None) -> Contestant:
    """A method of this package, in the loop its users write."""
    sample = make()

    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        method = make()  # its own state
        stepper = optimizer.over(bench.model)

        def work() -> None:
            with bench.precision():
                method.backward(bench.model, bench.batch, bench.objective)
            stepper.step()
            stepper.zero_grad()

        return work

    period = max(int(getattr(sample, attribute, 1)) for attribute in PERIODS)
    return Contestant(name or type(sample).__name__, "deltasam", build, period)


def field() -> list[Contestant]:
    """The implementations of other packages, as far as they are installed here."""
    if util.find_spec("pytorch_optimizer") is None:
        return []
    return [_closure_style(name) for name in ("SAM", "FriendlySAM", "LookSAM")]


def _closure_style(name: str) -> Contestant:
    def build(bench: Workbench, optimizer: Optimizer) -> Work:
        kind = getattr(import_module("pytorch_optimizer"), name)
        stepper = kind(bench.model.parameters(), optimizer.kind, **optimizer.options)

        def closure() -> torch.Tensor:
            with bench.precision():
                loss = bench.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        def work() -> None:
            closure()
            stepper.step(closure)
            stepper.zero_grad()

        return work

    return Contestant(f"pytorch_optimizer.{name}", "field", build, 10 if name == "LookSAM" else 1)
