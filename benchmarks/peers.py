"""Runs every method of this package, and the SAM optimizers people install, through the traps of the field.

    python benchmarks/peers.py --fetch build/peers > docs/robustness.md

The peers are used as their documentation says. ``--fetch`` installs those that are not in the environment into a
folder outside it; without it they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peer_optimizers import OTHERS, Batch, Candidate, fetch, losses, ours, pytorch_optimizer, seen, version
from peer_optimizers import mixed as autocast_of
from torch import Tensor, nn

from deltasam import Directional
from deltasam.lab.catalogue import METHODS

YES, NO = "yes", "**no**"
RISE = 0.03  # of the loss, in the checks in bfloat16: as small as SAM's are in fine-tuning
SEEDS = range(4)  # of models and batches, over which the checks in bfloat16 average
WHOLE_BATCH = {"ESAM": {"gamma": 1.0}}  # by default it leaves out instances by their rise, which rounding changes
# Rounding in a bfloat16 model changes the default weights of DeltaSAM, and so its direction; it recommends these.
IN_BFLOAT16: dict[str, dict[str, Any]] = {**WHOLE_BATCH, "DeltaSAM": {"weighting": Directional()}}


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


# -- the checks: a right answer, or what went wrong -----------------------------------------------------------------


def difference(model: nn.Module, before: dict[str, Tensor]) -> float:
    after = model.state_dict()
    return max(float((after[n].float() - before[n].float()).abs().max()) for n in before)


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def drift(c: Candidate, dtype: torch.dtype) -> str:
    model, batch = fresh(dtype)
    step, _ = c.build(model, {}, 0.0)
    before = saved(model)
    for _ in range(20):
        step(batch)
    moved = difference(model, before)
    return YES if moved == 0 else f"{NO} ({moved:.0e})"


def unused_branch(c: Candidate) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 0.0)
    before = saved(model.branch)
    model.passes = 0
    step(batch)
    moved = difference(model.branch, before)
    return YES if moved < 1e-6 else f"{NO} ({moved:.0e} off)"


def moments(c: Candidate) -> str:
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


def infinite(c: Candidate) -> str:
    if not c.ascends:
        return "-"
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    with poisoned(model):
        step(batch)
    return YES if all(bool(torch.isfinite(p).all()) for p in model.parameters()) else f"{NO} (NaN)"


def zero_radius(c: Candidate) -> str:
    if not c.has_rho:
        return "-"
    model, batch = fresh()
    step, _ = c.build(model, {"rho": 0.0}, 1e-3)
    plain, _ = fresh()
    optimizer = c.base(plain, 1e-3)
    torch.manual_seed(7)
    for _ in range(3):
        step(batch)
    torch.manual_seed(7)
    for _ in range(3):
        losses(plain, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return YES if difference(model, plain.state_dict()) == 0 else NO


def failing_pass(c: Candidate) -> str:
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


def addresses(c: Candidate) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    before = [p.data_ptr() for p in model.parameters()]
    step(batch)
    return YES if before == [p.data_ptr() for p in model.parameters()] else NO


def resumed(c: Candidate) -> str:
    """Two steps, a checkpoint, two more with new objects; against four in a row."""

    def steps(step: Callable[[Batch], Any], batch: Batch, numbers: Sequence[int]) -> None:
        for number in numbers:
            torch.manual_seed(number)
            step(batch)

    whole, batch = fresh()
    step, _ = c.build(whole, {}, 1e-3)
    steps(step, batch, range(4))
    first, _ = fresh()
    step, holder = c.build(first, {}, 1e-3)
    steps(step, batch, range(2))
    second, _ = fresh()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step, other = c.build(second, {}, 1e-3)
    other.load_state_dict(copy.deepcopy(holder.state_dict()))
    steps(step, batch, range(2, 4))
    off = difference(second, whole.state_dict())
    return YES if off == 0 else f"{NO} ({off:.0e} off)"


class Block(nn.Module):
    """A layer of a transformer, normalised first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        n, t, width = h.shape
        q, k, v = self.qkv(self.norms[0](h)).view(n, t, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) * (width // 4) ** -0.5).softmax(-1)
        h = h + self.out((scores @ v).transpose(1, 2).reshape(n, t, width))
        return h + self.mlp(self.norms[1](h))


class Transformer(nn.Module):
    """Float32 weights, of the size that language models start from, as a file in another dtype has them."""

    def __init__(self, stored: torch.dtype, width: int = 128) -> None:
        super().__init__()
        self.mixed = False
        self.embeddings = nn.Embedding(500, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)
        with torch.no_grad():
            for p in self.parameters():
                if p.ndim > 1:
                    nn.init.normal_(p, std=0.02)
                p.copy_(p.to(stored))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.embeddings(ids))).mean(1)
        with torch.autocast("cpu", enabled=False):  # logits of bfloat16 would be noise beside so small a rise
            return self.head(h.to(self.head.weight.dtype))


@dataclass(frozen=True)
class Observed:
    """One step at lr = 0: the loss and the weights of its last forward minus those at w, its last gradient."""

    rise: float
    move: Tensor
    gradient: Tensor


def observed(c: Candidate, model: nn.Module, batch: Batch, options: dict[str, Any]) -> Observed:
    step, _ = c.build(model, options, 0.0)
    with torch.no_grad(), autocast_of(model):
        at_w = float(losses(model, batch).mean())
    before, weights = flat(model), []
    handle = model.register_forward_pre_hook(lambda *_: weights.append(flat(model)))
    step(batch)
    handle.remove()
    return Observed(float(seen.loss) - at_w, weights[-1] - before, seen.gradient)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def float32_steps(
    c: Candidate, stored: torch.dtype, options: dict[str, Any]
) -> Iterator[tuple[Transformer, Batch, dict[str, Any], Observed]]:
    """For every seed a model, a batch, options with the radius that raises the loss by RISE, and that step."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = Transformer(stored).train()
        batch = torch.randint(500, (8, 4)), torch.randint(3, (8,))
        rho = RISE * 1e-3 / abs(observed(c, copy.deepcopy(model), batch, {**options, "rho": 1e-3}).rise)
        found = {**options, "rho": rho}
        yield model, batch, found, observed(c, copy.deepcopy(model), batch, found)


def rounded(c: Candidate) -> str:
    """Whether bfloat16 weights move as float32 weights of the same values do: the projection on that move, to 10%.

    Of a method that adds its perturbation to the outputs of the layers, the rise of the loss is compared.
    """
    if not c.ascends or not c.has_rho:
        return "-"
    shares = []
    for model, batch, options, meant in float32_steps(c, torch.bfloat16, IN_BFLOAT16.get(c.name, {})):
        found = observed(c, model.to(torch.bfloat16), batch, options)
        along = float(found.move @ meant.move / (meant.move @ meant.move)) if c.moves else found.rise / meant.rise
        shares.append(along)
    share = fmean(shares)
    return YES if abs(share - 1) < 0.1 else f"{NO} ({share:.2f} of it arrives)"


def arrives(c: Candidate) -> str:
    """Whether a step under autocast is the float32 one: the loss's rise to 10%, the gradient to a cosine of 0.99."""
    if not c.ascends or not c.has_rho:
        return "-"
    right, shown = True, []
    for name, stored in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        shares, cosines = [], []
        for model, batch, options, meant in float32_steps(c, stored, WHOLE_BATCH.get(c.name, {})):
            model.mixed = True
            found = observed(c, model, batch, options)
            shares.append(found.rise / meant.rise)
            cosines.append(float(torch.nn.functional.cosine_similarity(found.gradient, meant.gradient, dim=0)))
        share, cosine = fmean(shares), fmean(cosines)
        right = right and abs(share - 1) < 0.1 and cosine > 0.99
        shown.append(f"{name} file: {share:.2f} of the rise, cosine {cosine:.2f}")
    return YES if right else f"{NO} ({'; '.join(shown)})"


CHECKS: dict[str, Callable[[Candidate], str]] = {
    "weights unchanged after 20 steps at lr = 0, float32": lambda c: drift(c, torch.float32),
    "the same, bfloat16 weights": lambda c: drift(c, torch.bfloat16),
    "a parameter that pass 2 does not use comes back": unused_branch,
    "weights intact when pass 2 fails (out of memory, Ctrl-C)": failing_pass,
    "one infinite gradient in pass 1 leaves the weights finite": infinite,
    "the checkpoint holds the moments of the base optimizer": moments,
    "a resumed run is the uninterrupted one, bit for bit": resumed,
    "bfloat16 weights: the perturbation arrives": rounded,
    "bfloat16 autocast, float32 weights from a bf16 or fp16 file: the perturbation arrives": arrives,
    "rho = 0 is plain training, bit for bit, with dropout": zero_radius,
    "the weights stay at their addresses": addresses,
}


def answer(check: Callable[[Candidate], str], c: Candidate) -> str:
    try:
        return check(c)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its answer
        return f"{NO} ({type(error).__name__})"


def all_of_ours(check: Callable[[Candidate], str]) -> str:
    answers = {name: answer(check, ours(name, kind)) for name, kind in METHODS.items()}
    counted = {name: found for name, found in answers.items() if found != "-"}
    wrong = [f"{name} {found}" for name, found in counted.items() if found != YES]
    right = f"{len(counted) - len(wrong)} of {len(counted)}"
    return f"{right}; {', '.join(wrong)}" if wrong else f"{YES} ({right})"


def table(peers: Sequence[Candidate], mine: dict[str, str]) -> None:
    print("| check | deltasam, all methods | " + " | ".join(c.name for c in peers) + " |")
    print("|---|---|" + "---|" * len(peers))
    for text, check in CHECKS.items():
        print(f"| {text} | {mine[text]} | " + " | ".join(answer(check, c) for c in peers) + " |", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--fetch", type=Path, metavar="FOLDER", help="install the other peers here")
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.fetch is not None:
        fetch(given.fetch)
    first: list[Candidate] = []
    with contextlib.suppress(ImportError):
        first = [pytorch_optimizer(name) for name in ("SAM", "FriendlySAM", "LookSAM", "WSAM", "GSAM", "BSAM")]
    mine = {text: all_of_ours(check) for text, check in CHECKS.items()}
    named = ("pytorch_optimizer", "sam-pytorch", "zij", "atorch", "heavyball", "torchzero")
    words = {name: version(name) for name in named}
    torch_version = torch.__version__.split("+")[0]
    numbers = {"methods": len(METHODS), "rise": RISE, "seeds": len(SEEDS)}
    print(HEAD.format(torch=torch_version, version=words["pytorch_optimizer"], **numbers))
    table(first, mine)
    others: list[Candidate] = []
    for make in OTHERS:
        with contextlib.suppress(ImportError):
            others.append(make())
    if others:
        print(MORE.format(**{name.replace("-", "_"): number for name, number in words.items()}))
        table(others, mine)
    print(TAIL)
    for what, how in TESTED.items():
        print(f"| {what} | {how} |")


HEAD = """# Robustness

Made by `python benchmarks/peers.py --fetch build/peers > docs/robustness.md` with torch {torch}: the {methods} methods
of this package, and the optimizers of pytorch_optimizer {version} (the other columns), each used as its documentation
says, with AdamW (BSAM is an optimizer of its own), on a small model with dropout. In brackets: the largest error of a
weight. A dash means that the check does not apply: a method without a radius, or one whose first backward trains.
BSAM discards the gradient that is infinite here.

The two rows about the perturbation in bfloat16 use a transformer of 0.46 million weights of standard deviation
0.02, at the radius that raises the loss by {rise} in float32, and average over {seeds} models and batches. The
first compares the move of bfloat16 weights with the move of float32 weights of the same values: the projection on
that move must be within 10% of 1 (of PerInstanceSAM, the rise of the loss). The second compares a step under autocast
with the same step in float32: the rise of the loss must agree to 10%, the gradient to a cosine of 0.99.

deltasam rounds the perturbation stochastically to what the weights are stored or used in, so that it arrives in the
mean; {{doc}}`precision` explains how. PerInstanceSAM does not move the weights. It adds its perturbation to the
outputs of layers, which are bfloat16 here, and loses what is too small for their precision. At this radius about
0.8 of the rise arrives, both under autocast and with bfloat16 weights; at a larger radius nearly all of it does.
DeltaSAM uses `Directional()` in the first row, as its warning recommends for bfloat16 weights. Its default weights are
mostly rounding error there: the perturbation arrives, but its direction differs from the float32 one, and the
projection is about 0.5.
"""

MORE = """
The same for others that can be installed: sam-pytorch {sam_pytorch}, zij {zij} (whose SAM is davda54's, which is on no
index), atorch {atorch}, heavyball {heavyball} and torchzero {torchzero} (with their own AdamW, and torch.compile
switched off). Composer's SAM cannot be imported without the whole of Composer, which was left out.
"""

TESTED = {
    "DDP and FSDP2, 2 and 4 processes: gradients of one process, to 1e-10 in float64": "`pytest tests/distributed`",
    "`accelerate launch`, DDP and FSDP2, in a loop and in the Trainer: weights of one process, to 1e-10": (
        "`pytest tests/integrations/test_data_parallel.py`; the Trainer with `-m slow`"
    ),
    '`scope="local"` sends as many bytes as plain training; per-instance sends nothing in its first pass': (
        "`pytest tests/distributed`"
    ),
    "SIGKILL at random moments: the weights of an undisturbed run, bit for bit": (
        "`pytest tests/faults/test_runs.py`; 20 kills with `-m slow`"
    ),
    "SIGKILL of one process of two (DDP, FSDP2): all end and say so, the same command goes on, bit for bit": (
        "`pytest -m slow tests/faults/test_ranks.py`"
    ),
    "a worker of the data loader dies; a kill while the folder of a run is made: the same command goes on": (
        "`pytest tests/faults/test_lost.py`"
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
    '`on_out_of_memory="split"`: the step again in parts, the gradient of the whole batch to 1e-10': (
        "`pytest tests/faults/test_splitting.py`"
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
