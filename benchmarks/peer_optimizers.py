"""The candidates of ``peers.py``: the methods of this package and the SAM optimizers of other packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from deltasam import Classification
from deltasam.methods import Method

Batch = tuple[Tensor, Tensor]
Made = tuple[Callable[[Batch], Any], Any]  # a step, and the object whose state is saved

#: Installed without dependencies: for a step they need torch alone.
PACKAGES = ("sam-pytorch==0.0.1", "zij==0.1.1", "atorch==0.2.5", "heavyball==3.2.1", "torchzero==0.4.4")


def fetch(folder: Path) -> None:
    """Installs the other peers outside the environment and makes them importable."""
    if not folder.is_dir():
        constraints = Path(__file__).parents[1] / "constraints.txt"
        words = ["install", "--quiet", "--no-deps", "--target", str(folder), "--constraint", str(constraints)]
        subprocess.run([sys.executable, "-m", "pip", *words, *PACKAGES], check=True, stdout=sys.stderr)
    sys.path.append(str(folder))


@dataclass
class Seen:
    """Mean loss of the last forward pass, and the gradient after the last backward pass."""

    loss: Tensor | None = None
    gradient: Tensor | None = None

    def note(self, model: nn.Module) -> None:
        self.gradient = torch.cat([p.grad.detach().flatten() for p in model.parameters() if p.grad is not None])


seen = Seen()


class Losses(Classification):
    """Cross-entropy in float32; its mean is noted."""

    def losses(self, outputs: Tensor, batch: Any) -> Tensor:
        found = super().losses(outputs.float(), batch)
        seen.loss = found.detach().mean()
        return found


losses = Losses()


def mixed(model: nn.Module) -> AbstractContextManager[Any]:
    """bfloat16 autocast for models that have ``mixed = True``."""
    return torch.autocast("cpu", torch.bfloat16, enabled=getattr(model, "mixed", False))


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


@dataclass(frozen=True)
class Candidate:
    """``build(model, options, lr)`` returns ``step(batch)`` and the object with the state of the base optimizer."""

    name: str
    build: Callable[[nn.Module, dict[str, Any], float], Made]
    has_rho: bool = True  # with rho = 0 it should equal its base optimizer
    ascends: bool = True  # its first backward pass is for the perturbation only
    moves: bool = True  # it perturbs the weights themselves
    base: Callable[[nn.Module, float], Any] = adamw


def ours(name: str, kind: type[Method]) -> Candidate:
    def build(model: nn.Module, options: dict[str, Any], lr: float) -> Made:
        where = {"embeddings": "embeddings"} if "embeddings" in kind.__dataclass_fields__ else {}
        method = kind(**where, **(options if "rho" in kind.__dataclass_fields__ else {}))
        optimizer = adamw(model, lr)

        def step(batch: Batch) -> None:
            with mixed(model):
                method.backward(model, batch, losses)
            seen.note(model)
            optimizer.step()
            optimizer.zero_grad()

        def load(state: dict[str, Any]) -> None:
            optimizer.load_state_dict(state["optimizer"])
            method.load_state_dict(state["method"])

        save = lambda: {"optimizer": optimizer.state_dict(), "method": method.state_dict()}  # noqa: E731
        return step, SimpleNamespace(state_dict=save, load_state_dict=load)

    perturbs = "rho" in kind.__dataclass_fields__
    ascends = perturbs and kind.cost != "1/1"  # the only backward pass of MomentumSAM is that of the update
    return Candidate(name, build, perturbs, ascends, moves=perturbs and name != "PerInstanceSAM")


def by_closure(
    make: Callable[[nn.Module, dict[str, Any], float], Any], *, first: bool = False, answer: Any = lambda loss: loss
) -> Callable[[nn.Module, dict[str, Any], float], Made]:
    """A step with a closure; ``first``: the gradient at w is computed before it."""

    def build(model: nn.Module, options: dict[str, Any], lr: float) -> Made:
        optimizer = make(model, options, lr)
        held: dict[str, Any] = {}

        def closure(backward: bool = True) -> Any:
            with torch.enable_grad(), mixed(model):  # the forward pass only: torch caches casts
                loss = losses(model, held["batch"]).mean()
            if backward:
                optimizer.zero_grad()
                loss.backward()
                seen.note(model)
            return answer(loss)

        def step(batch: Batch) -> None:
            held["batch"] = batch
            if first:
                closure()
            optimizer.step(closure)
            optimizer.zero_grad()

        return step, optimizer

    return build


def pytorch_optimizer(name: str) -> Candidate:
    import pytorch_optimizer as package

    kind, base = getattr(package, name), torch.optim.AdamW

    def make(model: nn.Module, options: dict[str, Any], lr: float) -> Any:
        if name == "BSAM":
            return kind(model.parameters(), num_data=100, lr=lr, weight_decay=0.0, **options)
        if name == "WSAM":
            return kind(model, model.parameters(), base, lr=lr, weight_decay=0.0, **options)
        if name != "GSAM":
            return kind(model.parameters(), base, lr=lr, weight_decay=0.0, **options)
        rho = options.get("rho", 0.05)
        inner = base(model.parameters(), lr=lr, weight_decay=0.0)
        schedule = package.ProportionScheduler(
            package.LinearScheduler(inner, t_max=10**6, max_lr=max(lr, 1e-12)), max_lr=max(lr, 1e-12),
            min_lr=0.0, max_value=rho, min_value=rho,
        )  # fmt: skip
        optimizer = kind(model.parameters(), inner, model, schedule)
        optimizer.rho_t = rho
        inner.param_groups[0]["lr"] = lr
        return optimizer

    answer = (lambda loss: (None, loss)) if name == "GSAM" else (lambda loss: loss)
    build = by_closure(make, first=name not in ("WSAM", "GSAM"), answer=answer)
    return Candidate(name, build, has_rho=name != "BSAM")


def sam_pytorch() -> Candidate:
    from sam import SAM

    return Candidate("sam-pytorch SAM", by_closure(lambda m, o, lr: SAM(m.parameters(), adamw(m, lr), **o)))


def zij() -> Candidate:
    from zij import SAM

    def make(model: nn.Module, options: dict[str, Any], lr: float) -> Any:
        return SAM(model.parameters(), torch.optim.AdamW, lr=lr, weight_decay=0.0, **options)

    return Candidate("zij SAM (davda54's)", by_closure(make, first=True))


def atorch() -> Candidate:
    from atorch.optimizers.wsam import WeightedSAM

    return Candidate("atorch WSAM", by_closure(lambda m, o, lr: WeightedSAM(m, adamw(m, lr), **o)))


def heavyball() -> Candidate:
    import heavyball as package

    package.utils.compile_mode = None  # it compiles every step; the arithmetic is the same

    def base(model: nn.Module, lr: float) -> Any:
        return package.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def make(model: nn.Module, options: dict[str, Any], lr: float) -> Any:
        radius = {"ball": options["rho"]} if "rho" in options else {}
        return package.SAMWrapper(model.parameters(), base(model, lr), **radius)

    return Candidate("heavyball SAMWrapper", by_closure(make), base=base)


def torchzero() -> Candidate:
    import torchzero as tz

    def make(model: nn.Module, options: dict[str, Any], lr: float) -> Any:
        return tz.Optimizer(model.parameters(), tz.m.SAM(**options), tz.m.Adam(), tz.m.LR(lr))

    def base(model: nn.Module, lr: float) -> Any:
        return tz.Optimizer(model.parameters(), tz.m.Adam(), tz.m.LR(lr))

    return Candidate("torchzero SAM", by_closure(make), base=base)


PEERS: tuple[Callable[[], Candidate], ...] = (
    *(partial(pytorch_optimizer, name) for name in ("SAM", "FriendlySAM", "LookSAM", "WSAM", "GSAM", "BSAM")),
    sam_pytorch, zij, atorch, heavyball, torchzero,
)  # fmt: skip


def versions() -> dict[str, str]:
    """The installed versions of the peers."""
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    names = ("pytorch_optimizer", *(package.partition("==")[0] for package in PACKAGES))
    return {name: installed[name] for name in names if name in installed}
