"""Cases of ``rank_cases.py``: DDP's ``no_sync``, unused parameters, buffers, closures, and its own forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam import ASAM, ERM, GSAM, SAM, LookSAM, Method, PerInstanceSAM
from deltasam.integrations import MethodOptimizer
from helpers.problems import relative_error


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(world: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(3 * world, 4, generator=random).double(), torch.randint(3, (3 * world,), generator=random)


def objective(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def values(model: nn.Module, *, gradients: bool) -> dict[str, Tensor]:
    return {name: (p.grad if gradients else p).detach().clone() for name, p in model.named_parameters()}


def held_back(rank: int, world: int) -> dict[str, float]:
    """Relative errors of ``scope="global"`` on two micro-batches, the first of them in DDP's ``no_sync``."""
    found = {}
    whole = batches(world)
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in whole)
    for make in (SAM, GSAM, LookSAM, PerInstanceSAM):
        alone, method = network(), make()
        for _ in range(2):
            method.backward(alone, whole, objective, scale=0.5)
        inner, method = network(), make(scope="global")
        model = DistributedDataParallel(inner)
        with model.no_sync():
            method.backward(model, mine, objective, scale=0.5)
        method.backward(model, mine, objective, scale=0.5)
        found[make.__name__] = relative_error(values(inner, gradients=True), values(alone, gradients=True))
    return found


class Routed(nn.Module):
    """A second layer gets the rows whose first entry is positive: a process without such rows does not use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.second = nn.Linear(4, 3)  # before the first, so that the messages differ from the beginning
        self.first = nn.Linear(4, 3)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.first(rows)
        seen = rows[:, :1] > 0
        return found + seen * self.second(rows).tanh() if seen.any() else found


def routed(rank: int, world: int) -> dict[str, float]:
    """Relative errors if only the first process uses a layer."""
    found = {}
    rows, labels = batches(world)
    rows[:, 0] = torch.where(torch.arange(len(rows)) < 3, 1.0, -1.0) * rows[:, 0].abs()
    mine = rows[3 * rank : 3 * rank + 3], labels[3 * rank : 3 * rank + 3]
    for make in (SAM, GSAM, LookSAM):
        alone, inner = Routed(), Routed()
        make().backward(alone, (rows, labels), objective)
        model = DistributedDataParallel(inner, find_unused_parameters=True)
        make(scope="global").backward(model, mine, objective)
        found[make.__name__] = relative_error(values(inner, gradients=True), values(alone, gradients=True))
    return found


def buffers(rank: int, world: int) -> dict[str, float]:
    """Largest difference of BatchNorm's statistics to the first process after steps that bypass DDP's forward."""
    found = {}
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in batches(world))
    for make in (GSAM, LookSAM):
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(8)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 3)).double())
        for _ in range(2):
            make().backward(model, mine, objective)
        here = torch.cat([norm.running_mean, norm.running_var, norm.num_batches_tracked[None].double()])
        first = torch.cat([here[:-1], here.new_tensor([2.0])])  # one update of them in every step
        torch.distributed.broadcast(first, 0)
        found[make.__name__] = float((here - first).abs().max())
    return found


def compiled(rank: int, world: int) -> dict[str, float]:
    """The same with ``torch.compile`` around DDP, before and after Accelerate's ``unwrap_model``."""
    found = {}
    whole = batches(world)
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in whole)
    for make in (SAM, GSAM):
        alone = network()
        make().backward(alone, whole, objective)
        for unwrapped in (False, True):
            inner = network()
            model: Any = torch.compile(DistributedDataParallel(inner), backend="eager")
            if unwrapped:
                model._orig_mod = inner
            make(scope="global").backward(model, mine, objective)
            error = relative_error(values(inner, gradients=True), values(alone, gradients=True))
            found[f"{make.__name__}{' unwrapped' if unwrapped else ''}"] = error
    return found


def trained(model: Any, method: Method, batch: Any, *, by_closure: bool) -> dict[str, Tensor]:
    """The weights after three steps, through a closure or by ``method.backward``."""
    inner = getattr(model, "module", model)
    optimizer: Any = torch.optim.SGD(inner.parameters(), lr=0.1)
    if by_closure:
        optimizer = MethodOptimizer(optimizer, method, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(model, batch).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        if not by_closure:
            method.backward(model, batch, objective)
        optimizer.step(*[closure][: int(by_closure)])
    return values(inner, gradients=False)


def closures(rank: int, world: int) -> dict[str, float]:
    """Relative errors of the weights after steps with a closure: against ``method.backward``, and one process."""
    found = {}
    whole = batches(world)
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in whole)
    views = {"gradient_as_bucket_view": True}
    for make in (ERM, SAM, ASAM, GSAM, partial(LookSAM, k=2)):
        ends = {}
        for scope in ("local", "global"):
            name = f"{make().__class__.__name__} {scope}"
            options = {"scope": scope} | ({} if make is ERM else {"rho": 0.5})
            ends[scope] = trained(DistributedDataParallel(network(), **views), make(**options), mine, by_closure=True)
            wanted = trained(DistributedDataParallel(network()), make(**options), mine, by_closure=False)
            found[name] = relative_error(ends[scope], wanted)
            pair = [DistributedDataParallel(Routed(), find_unused_parameters=True, **views) for _ in range(2)]
            first = mine[0][:, :1].abs() * (1 if rank == 0 else -1)  # only the first process uses the second layer
            some = torch.cat([first, mine[0][:, 1:]], 1), mine[1]
            given, wanted = (trained(pair[way], make(**options), some, by_closure=bool(way)) for way in (1, 0))
            found[f"{name} routed"] = relative_error(given, wanted)
        alone = trained(network(), make(**options), whole, by_closure=True)
        found[f"{name} alone"] = relative_error(ends["global"], alone)
        assert make is ERM or relative_error(ends["local"], ends["global"]) > 1e-3, "local and global do not differ"
    return found


def unwrapped(rank: int, world: int) -> dict[str, str]:
    """The error of a closure that uses DDP while the optimizer has the model inside; plain training is right."""
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in batches(world))
    found = {}
    for name, method in {"plain": ERM(), "local": SAM(), "global": SAM(scope="global")}.items():
        inner = network()
        model = DistributedDataParallel(inner)
        optimizer = MethodOptimizer(torch.optim.SGD(inner.parameters(), lr=0.1), method, inner)

        def closure(model: nn.Module = model) -> Tensor:
            loss = objective(model, mine).mean()
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


class Framework(nn.Module):
    """Trains inside its forward, as Lightning's modules do under DDP with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.message = ""

    def forward(self, batch: Any) -> Tensor:
        try:
            SAM().backward(self.network, batch, objective)
        except ValueError as error:
            self.message = str(error)
        SAM().backward(network(), batch, objective)  # another model, which is not in DDP
        return self.network(batch[0])


def inside(rank: int, world: int) -> dict[str, str]:
    """The message for a part of a model inside DDP's forward."""
    framework = Framework()
    DistributedDataParallel(framework)(batches(world))
    return {"part": framework.message}


def uneven(rank: int, world: int) -> dict[str, Any]:
    """Uneven inputs under DDP's ``join``: steps with only DDP's exchanges, and the message for others."""
    found: dict[str, Any] = {}
    whole = batches(world)
    mine = tuple(value[3 * rank : 3 * rank + 3] for value in whole)
    for name, method in {"local": SAM(), "global": SAM(scope="global"), "gsam": GSAM()}.items():
        inner = network()
        model = DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        try:
            with model.join():
                for _ in range(2 + rank):
                    method.backward(model, mine, objective)
                    optimizer.step()
                    optimizer.zero_grad()
            found[name] = float(torch.cat([p.detach().flatten() for p in inner.parameters()]).abs().sum())
        except ValueError as error:
            found[name] = str(error)
    return found
