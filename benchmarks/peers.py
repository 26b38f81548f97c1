"""Checks every method of this package, and the SAM optimizers of other packages, for common faults.

    python benchmarks/peers.py --fetch build/peers
    python -m deltasam.lab.pages  # the tables of docs/robustness.md

The peers are used as documented. ``--fetch`` installs those that are missing into a folder outside the environment;
without it they are left out. The answers are written to ``results/peers/checks.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peer_optimizers import PEERS, Batch, Candidate, fetch, losses, ours, seen, versions
from peer_optimizers import mixed as autocast_of
from torch import Tensor, nn

from deltasam import Directional
from deltasam.lab.catalogue import METHODS

OUT = Path(__file__).parents[1] / "results" / "peers" / "checks.json"
OURS = "deltasam, all methods"
YES, NO = "yes", "**no**"
RISE = 0.03  # of the loss in the bfloat16 checks: as small as in fine-tuning
SEEDS = range(4)  # of the models and batches that the bfloat16 checks average over
WHOLE_BATCH = {"ESAM": {"gamma": 1.0}}  # by default it selects instances by their rise, which rounding changes
# Rounding in a bfloat16 model changes the default weights of these methods and thus their direction; these are exact.
IN_BFLOAT16: dict[str, dict[str, Any]] = {
    **WHOLE_BATCH,
    "DeltaSAM": {"weighting": Directional()},
    "RWSAM": {"norms": "exact"},
}


class Net(nn.Module):
    """Dropout, a norm, an embedding, and a branch that some passes skip (LayerDrop, experts, task heads)."""

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


# -- the checks: each returns YES, or what went wrong ---------------------------------------------------------------


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


def infinite(c: Candidate) -> str:
    """Makes one gradient of the first backward pass infinite."""
    if not c.ascends:
        return "-"
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    factors = iter([float("inf")])
    model.body[0].weight.register_hook(lambda grad: grad * next(factors, 1.0))
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
    before, passes = saved(model), iter([False, True])

    def fail(*_: Any) -> None:
        if next(passes, False):
            raise MemoryError

    model.register_forward_pre_hook(fail)
    with contextlib.suppress(MemoryError):
        step(batch)
    moved = difference(model, before)
    return YES if moved == 0 else f"{NO} ({moved:.0e} off)"


def addresses(c: Candidate) -> str:
    model, batch = fresh()
    step, _ = c.build(model, {}, 1e-3)
    before = [p.data_ptr() for p in model.parameters()]
    step(batch)
    return YES if before == [p.data_ptr() for p in model.parameters()] else NO


def resumed(c: Candidate) -> str:
    """Compares two steps, a checkpoint and two more steps of new objects with four steps in a row."""

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
    """A pre-norm transformer layer."""

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
    """Float32 weights with the scale of language models, rounded to the dtype of a checkpoint file."""

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
        with torch.autocast("cpu", enabled=False):  # the rise is smaller than the rounding of bfloat16 logits
            return self.head(h.to(self.head.weight.dtype))


@dataclass(frozen=True)
class Observed:
    """One step at lr = 0: loss and weights of its last forward pass minus those at w, and its last gradient."""

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
    """For every seed: a model, a batch, options with the radius that raises the loss by RISE, and that step."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = Transformer(stored).train()
        batch = torch.randint(500, (8, 4)), torch.randint(3, (8,))
        rho = RISE * 1e-3 / abs(observed(c, copy.deepcopy(model), batch, {**options, "rho": 1e-3}).rise)
        found = {**options, "rho": rho}
        yield model, batch, found, observed(c, copy.deepcopy(model), batch, found)


def rounded(c: Candidate) -> str:
    """Whether bfloat16 weights move like float32 weights of the same values: projection on that move within 10% of 1.

    For a method that adds its perturbation to the outputs of the layers, the rise of the loss is compared instead.
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
    """Whether a step under autocast matches float32: rise of the loss to 10%, gradient to a cosine of 0.99."""
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
    except Exception as error:  # noqa: BLE001 - an exception of a peer is its answer
        return f"{NO} ({type(error).__name__})"


def all_of_ours(check: Callable[[Candidate], str]) -> str:
    kinds = {name: kind for name, kind in METHODS.items() if not kind.needs_adapters}  # the models here have none
    answers = {name: answer(check, ours(name, kind)) for name, kind in kinds.items()}
    counted = {name: found for name, found in answers.items() if found != "-"}
    wrong = [f"{name} {found}" for name, found in counted.items() if found != YES]
    right = f"{len(counted) - len(wrong)} of {len(counted)}"
    return f"{right}; {', '.join(wrong)}" if wrong else f"{YES} ({right})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--fetch", type=Path, metavar="FOLDER", help="install the other peers here")
    options.add_argument("--out", type=Path, default=OUT)
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.fetch is not None:
        fetch(given.fetch)
    answers = {OURS: {text: all_of_ours(check) for text, check in CHECKS.items()}}
    for make in PEERS:
        with contextlib.suppress(ImportError):
            peer = make()
            answers[peer.name] = {text: answer(check, peer) for text, check in CHECKS.items()}
            print(peer.name, answers[peer.name], flush=True)
    record = {"torch": torch.__version__.split("+")[0], "versions": versions(), "answers": answers}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
