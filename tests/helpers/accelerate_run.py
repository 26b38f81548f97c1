"""One process of ``accelerate launch``, or a single process as its reference.

``accelerate_run.py FOLDER CASE...`` writes the weights of every case to ``CASE-WORLD.pt``;
``accelerate_run.py cli ...`` is ``deltasam ...``, of which ``DELTASAM_KILL=RANK:STEP:FILE`` kills a process, once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deltasam import Classification
from deltasam.methods import ASAM, SAM, FreeLB, Method, PerInstanceSAM
from helpers import fsdp_on_cpu

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

METHODS: dict[str, Callable[..., Method]] = {
    "sam": SAM,
    "asam": ASAM,
    "per-instance": PerInstanceSAM,
    "freelb": lambda **options: FreeLB(init_magnitude=0.0, **options),
}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, gathered if they are sharded."""
    found = model.state_dict()
    return {name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().clone() for name, w in found.items()}


def trained(folder: Path, name: str, *, fsdp: bool, **options: Any) -> Any:
    from helpers.ddp_run import trainer_for

    method = METHODS[name](scope="global")
    settings = {"max_steps": 3, **(SHARDED if fsdp and WORLD > 1 else {}), **options}
    trainer = trainer_for("bert", method, folder / f"{name}-{fsdp}-{WORLD}", **settings)
    resume = settings.get("resume_from_checkpoint")
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def trainers(folder: Path, *, fsdp: bool) -> dict[str, Any]:
    """Three steps of every method; with shards also by AdamW and resumed from a checkpoint."""
    found: dict[str, Any] = {}
    for name in METHODS:
        trainer = trained(folder, name, fsdp=fsdp)
        found[name] = whole(trainer.model)
    if WORLD == 1:
        return found
    kind = type(trainer.model_wrapped).__name__
    assert kind.startswith("FSDP") if fsdp else kind == "DistributedDataParallel", kind
    if fsdp:
        saving = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
        first = whole(trained(folder / "resumed", "sam", fsdp=True, **saving).model)
        place = folder / "resumed" / f"sam-True-{WORLD}" / "checkpoint-2"
        again = trained(folder / "resumed", "sam", fsdp=True, **saving | {"resume_from_checkpoint": str(place)})
        found["resumed"] = max(float((w - first[n]).abs().max()) for n, w in whole(again.model).items())
    return found


def loop(folder: Path, *, fsdp: bool) -> dict[str, Any]:
    """A plain loop with an Accelerator, as in ``examples/accelerate_loop.py``, and one without, in one process."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    found = {}
    for who in ("all", "one"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.randn(24, 6).double(), torch.randint(3, (24,)))
        loader: Any = DataLoader(data, batch_size=8 if who == "one" else 8 // WORLD)
        if who == "all":
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            found["kind"] = type(model).__name__
        method = SAM(rho=0.1, scope="global")
        for batch in loader:
            method.backward(model, batch, Classification())
            norm = accelerator.clip_grad_norm_ if who == "all" else nn.utils.clip_grad_norm_
            norm(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found[who] = {name.removeprefix("module."): w for name, w in whole(model).items()}
    return found


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ddp-loop": lambda folder: loop(folder, fsdp=False),
    "ddp-trainer": lambda folder: trainers(folder, fsdp=False),
    "fsdp-loop": lambda folder: loop(folder, fsdp=True),
    "fsdp-trainer": lambda folder: trainers(folder, fsdp=True),
}


def main(folder: Path, cases: list[str]) -> None:
    for case in cases:
        if case.startswith("fsdp"):
            os.environ["ACCELERATE_USE_FSDP"] = "true"
        else:
            os.environ.pop("ACCELERATE_USE_FSDP", None)
        found = CASES[case](folder)
        if RANK == 0:
            torch.save(found, folder / f"{case}-{WORLD}.pt")
        fsdp_on_cpu.forget()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def kill(rank: str, step: str, file: str) -> None:
    """Kills the process in the middle of a step, once: the file marks that it has happened."""
    from deltasam.lab.experiments._trainer import RunTrainer

    original, calls = RunTrainer.training_step, 0

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(step) and int(rank) == RANK and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    RunTrainer.training_step = training_step


if __name__ == "__main__":
    fsdp_on_cpu.allow()
    if sys.argv[1] == "cli":
        from deltasam.lab.cli import main as deltasam

        if "DELTASAM_KILL" in os.environ:
            kill(*os.environ["DELTASAM_KILL"].split(":"))
        sys.exit(deltasam(sys.argv[2:]))
    main(Path(sys.argv[1]), sys.argv[2:])
