"""The host's part of one eager step: where the time of our own code goes, for an MLP and for 200 small parameters.

    PYTHONPATH=src python benchmarks/overhead.py [--steps 200]

Prints, for each model and one thread on the CPU:

- a plain step, ERM, SAM, SAM of pytorch_optimizer (if installed) and SAM written by hand, in milliseconds and plain
  steps. They alternate, and the time is that of this process (other processes do not count);
- "own code": SAM minus SAM by hand, which is what checks, guards, copies and records cost;
- the checks alone: the structure of the model, shared memory, hooks, buffers, random states;
- a profile of a step of SAM by room. Of a C function the time belongs to its caller; a profiler makes Python slower.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deltasam import ERM, SAM
from deltasam.lab.commit import commit
from deltasam.step.checks import check_move
from deltasam.step.gradients import without_steps
from deltasam.step.randomness import Replay
from deltasam.step.structure import Structure

RHO, LR = 0.05, 1e-3
Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """The logits of a Hugging Face model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def mlp() -> tuple[nn.Module, Batch]:
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), (torch.randn(32, 64), torch.randint(10, (32,)))


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, int] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 100}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=12, **sizes)).train()
    return Classifier(model), (torch.randint(100, (2, 8)), torch.randint(2, (2,)))


def objective(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_hand(model: nn.Module, batch: Batch) -> None:
    """SAM without any check, for this model alone."""
    params = list(model.parameters())
    grads = torch.autograd.grad(objective(model, batch).mean(), params)
    size = RHO / float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])))
    origin = [p.data for p in params]
    for p, g in zip(params, grads, strict=True):
        p.data = torch.add(p.data, g, alpha=size)
    objective(model, batch).mean().backward()
    for p, w in zip(params, origin, strict=True):
        p.data = w


def steps(make: Callable[[], tuple[nn.Module, Batch]]) -> dict[str, Callable[[], None]]:
    """Each candidate has its own model, with the same weights."""

    def candidate(backward: Callable[[nn.Module, Batch], Any]) -> Callable[[], None]:
        torch.manual_seed(0)
        model, batch = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def step() -> None:
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def plain(model: nn.Module, batch: Batch) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()

    sam, erm = SAM(rho=RHO), ERM()
    found = {
        "plain": candidate(plain),
        "ERM": candidate(lambda model, batch: erm.backward(model, batch, objective)),
        "SAM": candidate(lambda model, batch: sam.backward(model, batch, objective)),
        "SAM by hand": candidate(by_hand),
    }
    try:
        import pytorch_optimizer
    except ImportError:
        return found
    torch.manual_seed(0)
    model, batch = make()
    peer = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=RHO, lr=LR)

    def closure() -> Tensor:
        peer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    def theirs() -> None:
        closure()
        peer.step(closure)
        peer.zero_grad()

    return {**found, "SAM of pytorch_optimizer": theirs}


def checks(make: Callable[[], tuple[nn.Module, Batch]]) -> dict[str, Callable[[], object]]:
    """What a step of SAM does once, besides the passes and the move."""
    model, _ = make()
    structure = Structure(model)
    params, trainable = list(structure.named.values()), structure.trainable
    replay = Replay(model, ())

    def extra() -> None:
        with replay.extra():
            pass

    return {
        "structure of the model": lambda: Structure(model).trainable,
        "shared memory": lambda: check_move(model, params, structure.named),
        "hooks": lambda: without_steps(trainable),
        "random states and buffers: start": lambda: Replay(model, (), structure=structure),
        "random states and buffers: extra pass": extra,
    }


def timed(candidates: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """The lower decile of the processor time of each, in milliseconds; they alternate."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for k in range(times + 3):
        for name, call in candidates.items():
            start = time.process_time()
            call()
            if k >= 3:
                found[name].append(time.process_time() - start)
    return {name: 1e3 * sorted(values)[len(values) // 10] for name, values in found.items()}


def room(file: str) -> str:
    """``deltasam/step/passes.py`` is in the room ``step``; everything of torch is one room."""
    parts = Path(file).parts
    if "deltasam" in parts:
        return f"deltasam/{parts[len(parts) - parts[::-1].index('deltasam')]}".removesuffix(".py")
    return "torch" if "torch" in parts else "other"


def profile(step: Callable[[], None], times: int) -> Counter[str]:
    """Milliseconds of one step by room; the time of a C function is that of its callers' rooms."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(times):
        step()
    profiler.disable()
    found: Counter[str] = Counter()
    stats: Any = pstats.Stats(profiler)
    for (file, _, _), (_, _, own, _, callers) in stats.stats.items():
        if file == "~":
            for (caller, _, _), (_, _, part, _) in callers.items():
                found[f"{room(caller)}, C functions that it calls"] += 1e3 * part / times
        else:
            found[room(file)] += 1e3 * own / times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the MLP; a tenth as many of BERT")
    parser.add_argument("--out", type=Path, default=Path("results/speed/overhead"), help="folder of the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    written: dict[str, float] = {}
    for make, times in ((mlp, options.steps), (bert, max(options.steps // 10, 5))):
        count = len(list(make()[0].parameters()))
        print(f"\n{make.__name__}, {count} parameters")
        candidates = steps(make)
        found = timed(candidates, times)
        for name, ms in found.items():
            print(f"  {name:<40} {ms:9.3f} ms {ms / found['plain']:6.2f} plain steps")
        print(f"  {'own code: SAM minus SAM by hand':<40} {found['SAM'] - found['SAM by hand']:9.3f} ms")
        parts = timed(checks(make), 10 * times)
        which = f"{make.__name__}, {count} parameters"
        written |= {f"{which}: {name}": ms for name, ms in found.items()}
        written |= {f"{which}: own code (SAM minus SAM by hand)": found["SAM"] - found["SAM by hand"]}
        written |= {f"{which}: checks, in all": sum(parts.values())}
        written |= {f"{which}: {name}": ms for name, ms in parts.items()}
        print(f"  {'checks, in all':<40} {sum(parts.values()):9.3f} ms")
        for name, ms in parts.items():
            print(f"    {name:<38} {ms:9.3f} ms")
        print("  profile of a step of SAM, by room")
        for name, ms in profile(candidates["SAM"], times).most_common():
            if ms >= 0.005:
                print(f"    {name:<50} {ms:9.3f} ms")
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.machine(), "torch": torch.__version__, "commit": commit()}
    record = {"milliseconds": written, "machine": machine}
    (options.out / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
