"""Runs every method of this package, and the SAM optimizers people install, through the traps of the field.

    python benchmarks/peers.py > docs/robustness.md

The peers are used as their documentation says. What is not installed is left out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam.methods import Method
from deltasam.methods.catalogue import METHODS

warnings.simplefilter("ignore")
Batch = tuple[Tensor, Tensor]
YES, NO = "yes", "**no**"


class Net(nn.Module):
    """Dropout, a norm, an embedding, and a branch that some passes leave out (LayerDrop, experts, heads of tasks)."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))
        self.branch = nn.Linear(16, 3)
        self.passes: int | None = None

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings(ids).mean(1)
        if self.passes is not None:
            self.passes += 1
        return self.body(h) + (self.branch(h) if self.passes in (None, 1) else 0)


def fresh(dtype: torch.dtype = torch.float32) -> tuple[Net, Batch]:
    torch.manual_seed(0)
    return Net().to(dtype).train(), (torch.randint(50, (8, 6)), torch.randint(3, (8,)))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


@dataclass(frozen=True)
class Contestant:
    """``build(model, options, lr)`` gives a step, ``step(batch)``, and what holds the state of the base optimizer."""

    name: str
    build: Callable[[Net, dict[str, Any], float], tuple[Callable[[Batch], Any], Any]]
    has_rho: bool = True  # and with rho = 0 it is AdamW
    ascends: bool = True  # its first backward serves the perturbation only


def ours(name: str, kind: type[Method]) -> Contestant:
    def build(model: Net, options: dict[str, Any], lr: float) -> tuple[Callable[[Batch], Any], Any]:
        where = {"embeddings": "embeddings"} if "embeddings" in kind.__dataclass_fields__ else {}
        method = kind(**where, **(options if "rho" in kind.__dataclass_fields__ else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

        def step(batch: Batch) -> None:
            method.backward(model, batch, losses)
            optimizer.step()
            optimizer.zero_grad()

        return step, optimizer

    perturbs_weights = "rho" in kind.__dataclass_fields__
    return Contestant(name, build, perturbs_weights, perturbs_weights)


def peer(name: str) -> Contestant:
    import pytorch_optimizer

    kind = getattr(pytorch_optimizer, name)
    base = torch.optim.AdamW

    def build(model: Net, options: dict[str, Any], lr: float) -> tuple[Callable[[Batch], Any], Any]:
        held: dict[str, Any] = {}
        if name == "BSAM":
            optimizer = kind(model.parameters(), num_data=100, lr=lr, weight_decay=0.0, **options)
        elif name == "WSAM":
            optimizer = kind(model, model.parameters(), base, lr=lr, weight_decay=0.0, **options)
        elif name == "GSAM":
            rho = options.get("rho", 0.05)
            inner = base(model.parameters(), lr=lr, weight_decay=0.0)
            schedule = pytorch_optimizer.ProportionScheduler(
                pytorch_optimizer.LinearScheduler(inner, t_max=10**6, max_lr=max(lr, 1e-12)), max_lr=max(lr, 1e-12),
                min_lr=0.0, max_value=rho, min_value=rho,
            )  # fmt: skip
            optimizer = kind(model.parameters(), inner, model, schedule)
            optimizer.rho_t = rho
            inner.param_groups[0]["lr"] = lr
        else:
            optimizer = kind(model.parameters(), base, lr=lr, weight_decay=0.0, **options)

        def closure() -> Any:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = losses(model, held["batch"]).mean()
            loss.backward()
            return (None, loss) if name == "GSAM" else loss

        def step(batch: Batch) -> None:
            held["batch"] = batch
            if name not in ("WSAM", "GSAM"):  # the others want the gradient at w before
                closure()
            optimizer.step(closure)
            optimizer.zero_grad()

        return step, optimizer

    return Contestant(name, build, has_rho=name != "BSAM")


# -- the checks: a right answer, or what went wrong -----------------------------------------------------------------


def difference(model: nn.Module, before: dict[str, Tensor]) -> float:
    after = model.state_dict()
    return max(float((after[n].float() - before[n].float()).abs().max()) for n in before)


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def drift(c: Contestant, dtype: torch.dtype) -> str:
    model, batch = fresh(dtype)
    step, _ = c.build(model, {}, 0.0)
    before = saved(model)
    for _ in range(20):
        step(batch)
    moved = difference(model, before)
    return YES if moved == 0 else f"{NO} ({moved:.0e})"


def unused_branch(c: Contestant) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 0.0)
    before = saved(model.branch)
    model.passes = 0
    step(batch)
    moved = difference(model.branch, before)
    return YES if moved < 1e-6 else f"{NO} ({moved:.0e} off)"


def moments(c: Contestant) -> str:
    model, batch = fresh()
    step, holder = c.build(model, {}, 1e-3)
    step(batch)
    return YES if _has_moments(holder.state_dict()) else NO


def _has_moments(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any("exp_avg" in str(k) or k in ("s", "momentum") or _has_moments(v) for k, v in value.items())


@contextlib.contextmanager
def poisoned(model: Net) -> Iterator[None]:
    """The first backward gives one gradient that is infinite."""
    calls = 0

    def spoil(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad * float("inf") if calls == 1 else grad

    handle = model.body[0].weight.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def infinite(c: Contestant) -> str:
    if not c.ascends:
        return "-"
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    with poisoned(model):
        step(batch)
    return YES if all(bool(torch.isfinite(p).all()) for p in model.parameters()) else f"{NO} (NaN)"


def zero_radius(c: Contestant) -> str:
    if not c.has_rho:
        return "-"
    model, batch = fresh()
    step, _ = c.build(model, {"rho": 0.0}, 1e-3)
    plain, _ = fresh()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    torch.manual_seed(7)
    for _ in range(3):
        step(batch)
    torch.manual_seed(7)
    for _ in range(3):
        losses(plain, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return YES if difference(model, plain.state_dict()) == 0 else NO


def failing_pass(c: Contestant) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 0.0)
    before, calls = saved(model), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError

    handle = model.register_forward_pre_hook(fail)
    with contextlib.suppress(MemoryError):
        step(batch)
    handle.remove()
    moved = difference(model, before)
    return YES if moved == 0 else f"{NO} ({moved:.0e} off)"


def addresses(c: Contestant) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    before = [p.data_ptr() for p in model.parameters()]
    step(batch)
    return YES if before == [p.data_ptr() for p in model.parameters()] else NO


CHECKS: dict[str, Callable[[Contestant], str]] = {
    "weights unchanged after 20 steps at lr = 0, float32": lambda c: drift(c, torch.float32),
    "the same, bfloat16 weights": lambda c: drift(c, torch.bfloat16),
    "a parameter that pass 2 does not use comes back": unused_branch,
    "weights intact when pass 2 fails (out of memory, Ctrl-C)": failing_pass,
    "one infinite gradient in pass 1 leaves the weights finite": infinite,
    "the checkpoint holds the moments of the base optimizer": moments,
    "rho = 0 is plain training, bit for bit, with dropout": zero_radius,
    "the weights stay at their addresses": addresses,
}


def answer(check: Callable[[Contestant], str], c: Contestant) -> str:
    try:
        return check(c)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{NO} ({type(error).__name__})"


def all_of_ours(check: Callable[[Contestant], str]) -> str:
    answers = {name: answer(check, ours(name, kind)) for name, kind in METHODS.items()}
    counted = {name: found for name, found in answers.items() if found != "-"}
    wrong = [f"{name} {found}" for name, found in counted.items() if found != YES]
    return f"{YES} ({len(counted)} of {len(counted)})" if not wrong else f"{NO}: {', '.join(wrong)}"


def main() -> None:
    torch.set_num_threads(1)
    peers: list[Contestant] = []
    version = "not installed"
    with contextlib.suppress(ImportError):
        peers = [peer(name) for name in ("SAM", "FriendlySAM", "LookSAM", "WSAM", "GSAM", "BSAM")]
        version = metadata.version("pytorch_optimizer")
    print(HEAD.format(version=version, torch=torch.__version__.split("+")[0], methods=len(METHODS)))
    print("| check | deltasam, all methods | " + " | ".join(c.name for c in peers) + " |")
    print("|---|---|" + "---|" * len(peers))
    for text, check in CHECKS.items():
        print(f"| {text} | {all_of_ours(check)} | " + " | ".join(answer(check, c) for c in peers) + " |", flush=True)
    print(TAIL)
    for what, how in TESTED.items():
        print(f"| {what} | {how} |")


HEAD = """# Robustness

Made by `python benchmarks/peers.py > docs/robustness.md` with torch {torch}: the {methods} methods of this package,
and the optimizers of pytorch_optimizer {version} (the other columns), each used as its documentation says, with AdamW
(BSAM is an optimizer of its own), on a small model with dropout. In brackets: the largest error of a weight.
A dash means that the check does not apply: a method without a radius, or one whose first backward trains.
BSAM discards the gradient that is infinite here.
"""

TESTED = {
    "DDP and FSDP2, 2 and 4 processes: gradients of one process, to 1e-10 in float64": "`pytest tests/distributed`",
    '`sharpness="local"` sends as many bytes as plain training; per-instance sends nothing in its first pass': (
        "`pytest tests/distributed`"
    ),
    "SIGKILL at random moments: the weights of an undisturbed run, bit for bit": (
        "`pytest tests/faults/test_runs.py`; 20 kills with `-m slow`"
    ),
    "SIGTERM, SIGINT: the update is finished, a checkpoint written, exit code 75, the same command goes on": (
        "`pytest tests/faults/test_runs.py`"
    ),
    "a checkpoint cut short or altered is found by its checksum and the one before is used; none runs code": (
        "`pytest tests/faults`"
    ),
    "a full disk or a read-only folder: one sentence, and what was there stays": "`pytest tests/faults`",
    "memory runs out in any pass: weights intact, the message names the pass and what to lower": (
        "`pytest tests/faults/test_memory.py`"
    ),
    "a gradient that is not finite: the update is left out; after 25 in a row the run ends and names a checkpoint": (
        "`pytest tests/faults/test_runs.py`"
    ),
    "generated configurations, batches and damaged files: a clear error or a right result": (
        "`make fuzz` (12,500); fewer in `pytest tests/fuzz`"
    ),
    "many steps of every method: memory flat, no hook or handle left, weights bit for bit at lr = 0": (
        "`pytest tests/faults/test_soak.py`; 20,000 steps with `-m slow`"
    ),
}

TAIL = """
## Faults and bad input

What this package is tested for beyond the table.

| what | the tests |
|---|---|"""

if __name__ == "__main__":
    main()
