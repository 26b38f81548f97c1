"""The processes of ``tests/parallel``: every case returns numbers, which the tests check.

Run as a script it starts the processes by fork, so that torch is imported once: ``rank_cases.py FOLDER WORLD...``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP and fully_shard import it: once here, not once in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deltasam import ERM, Classification, FreeLB, LossBudget, LossShare, MicroBatches, PerInstanceSAM, RDrop, Relative
from deltasam.methods import (
    ASAM,
    AWP,
    ESAM,
    GSAM,
    RWSAM,
    SAM,
    WSAM,
    BiLoRA,
    DeltaSAM,
    FriendlySAM,
    FunctionalSAM,
    GradientNormPenalty,
    LookSAM,
    Method,
    MomentumSAM,
    MultiStepSAM,
    RandomPerturbation,
    SubsetSAM,
)  # fmt: skip
from deltasam.weighting import Directional
from helpers.problems import Outputs, TinyTransformer, cross_entropy, relative_error
from helpers.rank_blocks import CAN_SHARD, blocks, kept, looped, parts
from helpers.rank_frozen import frozen_replicas, frozen_shards
from helpers.rank_replicas import buffers, closures, compiled, held_back, inside, routed, uneven, unwrapped

PART = 3  # instances per process
Batch = tuple[Tensor, Tensor]


def model_for(dropout: float, *, unused: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = TinyTransformer(dropout).double().train()
    model.unused_head.requires_grad_(unused)
    for p in model.parameters():
        p.data.mul_(2)
    return model


def whole_batch(world: int) -> Batch:
    random = torch.Generator().manual_seed(5)
    return torch.randint(1, 11, (PART * world, 7), generator=random), torch.randint(
        3, (PART * world,), generator=random
    )


def part_of(batch: Batch, rank: int) -> Batch:
    return batch[0][rank * PART : (rank + 1) * PART], batch[1][rank * PART : (rank + 1) * PART]


def rdrop(model: nn.Module, batch: Any) -> Tensor:
    return RDrop(Outputs(cross_entropy), alpha=0.5)(model, batch)


def methods() -> dict[str, tuple[Callable[..., Method], Any]]:
    """The methods with their objectives."""
    return {
        "erm": (ERM, cross_entropy),
        "sam": (SAM, cross_entropy),
        "sam-share": (lambda **o: SAM(rho=LossShare(0.1), **o), cross_entropy),
        "sam-tensors": (lambda **o: SAM(rho=Relative(0.05, per="tensor"), **o), cross_entropy),
        "sam-groups": (lambda **o: SAM(rho={"biases": 0.1, "rest": LossBudget(0.2)}, **o), cross_entropy),
        "delta-sam": (DeltaSAM, cross_entropy),
        "rw-sam": (RWSAM, cross_entropy),
        "asam": (ASAM, cross_entropy),
        "awp": (AWP, cross_entropy),
        "multi-step-sam": (lambda **o: MultiStepSAM(rho=0.3, ascent_steps=2, stride=0.7, **o), cross_entropy),
        "gsam": (GSAM, cross_entropy),
        "look-sam": (LookSAM, cross_entropy),
        "friendly-sam": (FriendlySAM, cross_entropy),
        "wsam": (WSAM, cross_entropy),
        "gradient-norm-penalty": (GradientNormPenalty, cross_entropy),
        "functional-sam": (FunctionalSAM, Classification()),
        "momentum-sam": (MomentumSAM, cross_entropy),
        "random": (RandomPerturbation, cross_entropy),
        "random-all": (lambda **o: RandomPerturbation(per="all", **o), cross_entropy),
        "bi-lora": (lambda **o: BiLoRA(params="trained", rho=0.5, lr=0.1, **o), cross_entropy),
        "esam": (lambda **o: ESAM(beta=0.7, gamma=1.0, **o), cross_entropy),
        "subset-sam": (lambda **o: SubsetSAM(fraction=1.0, **o), cross_entropy),
        "per-instance": (lambda **o: PerInstanceSAM(engine="low-rank", **o), cross_entropy),
        "per-instance-share": (lambda **o: PerInstanceSAM(rho=LossShare(0.1), **o), cross_entropy),
        "per-instance-loop": (lambda **o: PerInstanceSAM(engine="loop", **o), cross_entropy),
        "freelb": (lambda **o: FreeLB(init_magnitude=0.0, embeddings="embeddings", **o), cross_entropy),
        "rdrop": (ERM, rdrop),
        "sam-rdrop": (SAM, rdrop),
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[name.removeprefix("module.")] = grad.detach().clone()
    return found


def plain(
    make: Callable[..., Method], objective: Any, batch: Any, *, seed: int, dropout: float, steps: int = 1
) -> Any:
    """Gradients of one process without a wrapper."""
    model, method = model_for(dropout), make()
    torch.manual_seed(seed)
    for _ in range(steps):
        model.zero_grad()
        method.backward(model, batch, objective)
    return gradients(model)


def mean_of_ranks(make: Callable[..., Method], objective: Any, world: int, *, dropout: float, steps: int = 1) -> Any:
    batch = whole_batch(world)
    each = [plain(make, objective, part_of(batch, r), seed=r, dropout=dropout, steps=steps) for r in range(world)]
    return {name: torch.stack([grads[name] for grads in each]).mean(0) for name in each[0]}


# -- replicas ---------------------------------------------------------------------------------------------------------


def replicas(rank: int, world: int) -> dict[str, float]:
    """Relative errors under DDP: local against the mean of the processes, global against the large batch."""
    found = {}
    batch = whole_batch(world)
    for name, (make, objective) in methods().items():
        steps = 2 if make().buffers else 1  # the second one reuses
        for scope, dropout in (("local", 0.1), ("global", 0.0)):
            model = DistributedDataParallel(model_for(dropout))
            before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
            method = make(scope=scope)
            torch.manual_seed(rank)
            for _ in range(steps):
                model.zero_grad()
                method.backward(model, part_of(batch, rank), objective)
            if scope == "local":
                wanted = mean_of_ranks(make, objective, world, dropout=dropout, steps=steps)
            else:
                wanted = plain(make, objective, batch, seed=0, dropout=dropout, steps=steps)
            found[f"{name} {scope}"] = relative_error(gradients(model), wanted)
            moved = [q is None or p.data_ptr() != q or not torch.equal(p, w)
                     for p, (q, w) in zip(model.parameters(), before, strict=True)]  # fmt: skip
            found[f"{name} {scope} weights changed"] = float(any(moved))
    # Exact per-instance equals the large batch for any number of processes, with or without the option.
    model = DistributedDataParallel(model_for(0.0))
    PerInstanceSAM().backward(model, part_of(batch, rank), cross_entropy)
    wanted = plain(PerInstanceSAM, cross_entropy, batch, seed=0, dropout=0.0)
    found["per-instance is the large batch"] = relative_error(gradients(model), wanted)
    return found


def accumulation(rank: int, world: int) -> dict[str, float]:
    """Errors of ``no_sync`` followed by a backward that synchronises, and of parameters that some ranks do not use."""
    found = {}
    batch = whole_batch(world)
    for name in ("sam", "gsam", "freelb"):
        make, objective = methods()[name]
        model = DistributedDataParallel(model_for(0.0))
        with model.no_sync():
            make().backward(model, part_of(batch, rank), objective)
        own = plain(make, objective, part_of(batch, rank), seed=0, dropout=0.0)
        found[f"{name} held back"] = relative_error(gradients(model), own)
        make().backward(model, part_of(batch, rank), objective)
        wanted = mean_of_ranks(make, objective, world, dropout=0.0)
        found[f"{name} no_sync"] = relative_error(gradients(model), {n: 2 * g for n, g in wanted.items()})
        model = DistributedDataParallel(model_for(0.0, unused=True), find_unused_parameters=True)
        make().backward(model, part_of(batch, rank), objective)
        found[f"{name} unused"] = relative_error(gradients(model), wanted)
        found[f"{name} unused has a gradient"] = float("unused_head.weight" in gradients(model))
    return found


@contextmanager
def bytes_sent(model: DistributedDataParallel) -> Iterator[dict[str, int]]:
    """Bytes that leave a process: through DDP's buckets, and through every collective called by Python."""
    sent = {"bytes": 0}

    def through_python(state, bucket):  # type: ignore[no-untyped-def] # DDP reads the annotations
        return dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(model.process_group, bucket)

    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "reduce")
    originals = {name: getattr(dist, name) for name in names}

    def counting(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent["bytes"] += args[0].nbytes
            return original(*args, **kwargs)

        return call

    model.register_comm_hook(None, through_python)
    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def communication(rank: int, world: int) -> dict[str, float]:
    """Bytes of one step."""
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: F401

    found = {}
    batch = part_of(whole_batch(world), rank)
    for name, (make, objective) in methods().items():
        for scope in ("local", "global"):
            model = DistributedDataParallel(model_for(0.0))
            with bytes_sent(model) as sent:
                make(scope=scope).backward(model, batch, objective)
            found[f"{name} {scope}"] = float(sent["bytes"])
    parts = MicroBatches([(batch[0][:1], batch[1][:1]), (batch[0][1:], batch[1][1:])])
    for name in ("sam", "per-instance"):
        model = DistributedDataParallel(model_for(0.0))
        with bytes_sent(model) as sent:
            methods()[name][0]().backward(model, parts, cross_entropy)
        found[f"{name} micro-batches"] = float(sent["bytes"])
    return found


class Poisoned:
    """An objective whose first gradient is not finite on one of the processes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(model, batch)
        self.calls += 1
        if self.rank == 1 and self.calls == 1:
            losses = losses + (losses * 0).sqrt() * 0  # the slope of the root at 0 is not finite
        return losses


def decisions(rank: int, world: int) -> dict[str, float]:
    """Whether all processes skip together, and use the plain gradient then."""
    model = DistributedDataParallel(model_for(0.0))
    batch = whole_batch(world)
    step = SAM(scope="global").backward(model, part_of(batch, rank), Poisoned(rank))
    wanted = plain(ERM, cross_entropy, batch, seed=0, dropout=0.0)
    found = {"skipped": float(step.skipped), "plain": relative_error(gradients(model), wanted)}
    model = DistributedDataParallel(model_for(0.0))
    SAM().backward(model, part_of(batch, rank), Poisoned(rank))
    flat = torch.cat([g.flatten() for g in gradients(model).values()])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    found["local: finite and equal"] = float(
        bool(torch.isfinite(flat).all()) and all(torch.equal(flat, other) for other in others)
    )
    return found


# -- shards -----------------------------------------------------------------------------------------------------------


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.attention, model.feed, model):
        fully_shard(module, mesh=mesh)
    return model


@contextmanager
def draws_of_one_process() -> Iterator[None]:
    """Random directions inside are those that one process would draw, in parts."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    from deltasam.methods import _random_perturbation as noise
    from deltasam.weighting import _finite_difference as probes
    from deltasam.weighting import _norm_weights as norms

    draw = probes.random_direction
    whole = [p for p in model_for(0.0).parameters() if p.requires_grad]

    def given(params: Any, seed: Any) -> list[Tensor]:
        pairs = zip(params, draw(whole, seed), strict=True)
        return [distribute_tensor(r, p.device_mesh, p.placements) if isinstance(p, DTensor) else r for p, r in pairs]

    modules: Any = (probes, norms, noise)
    for module in modules:
        module.random_direction = given
    try:
        yield
    finally:
        for module in modules:
            module.random_direction = draw


def shards(rank: int, world: int) -> dict[str, float]:
    """Relative errors under ``fully_shard`` against the large batch, and whether shards are restored bit for bit."""
    found: dict[str, float] = {}
    batch = whole_batch(world)
    for name, (make, objective) in methods().items():
        if name.startswith("per-instance"):
            continue
        steps = 2 if make().buffers else 1
        model = sharded(model_for(0.0))
        method = make(scope="global")
        before = [(p.to_local().data_ptr(), p.to_local().detach().clone()) for p in model.parameters()]
        with draws_of_one_process():
            for _ in range(steps):
                model.zero_grad()
                method.backward(model, part_of(batch, rank), objective)
        wanted = plain(make, objective, batch, seed=0, dropout=0.0, steps=steps)
        found[name] = relative_error(gradients(model), wanted)
        moved = [p.to_local().data_ptr() != q or not torch.equal(p.to_local(), w)
                 for p, (q, w) in zip(model.parameters(), before, strict=True)]  # fmt: skip
        found[f"{name} weights changed"] = float(any(moved))
        method.backward(model, part_of(batch, rank), objective)  # a second backward adds to .grad
        if name in ("sam", "gsam", "erm"):
            double = {n: 2 * g for n, g in wanted.items()}
            found[f"{name} twice"] = relative_error(gradients(model), double)
    DeltaSAM(scope="global").backward(model, part_of(batch, rank), cross_entropy)  # with its own draws
    return found


def gathered(rank: int, world: int) -> dict[str, float]:
    """The same with ``scope="local"``: whole parameters during a step."""
    found: dict[str, float] = {}
    batch = whole_batch(world)
    for name, (make, objective) in methods().items():
        if make().edits_gradient:
            continue
        model = sharded(model_for(0.0))
        before = [(p.to_local().data_ptr(), p.to_local().detach().clone()) for p in model.parameters()]
        with torch.no_grad():
            model(batch[0])  # leaves the outermost parameters gathered
        with draws_of_one_process():
            make().backward(model, part_of(batch, rank), objective)
        wanted = mean_of_ranks(make, objective, world, dropout=0.0)
        found[name] = relative_error(gradients(model), wanted)
        moved = [p.to_local().data_ptr() != q or not torch.equal(p.to_local(), w)
                 for p, (q, w) in zip(model.parameters(), before, strict=True)]  # fmt: skip
        found[f"{name} weights changed"] = float(any(moved))
        with draws_of_one_process():
            make().backward(model, part_of(batch, rank), objective)  # a second backward adds to .grad
        found[f"{name} twice"] = relative_error(gradients(model), {n: 2 * g for n, g in wanted.items()})
    wanted = plain(PerInstanceSAM, cross_entropy, batch, seed=0, dropout=0.0)
    model.zero_grad()
    PerInstanceSAM().backward(model, part_of(batch, rank), cross_entropy)
    found["per-instance is the large batch"] = relative_error(gradients(model), wanted)
    return found


def directions(rank: int, world: int) -> dict[str, float]:
    """Random directions: equal where replicated, standard normal and different where sharded."""
    from deltasam.step.directions import random_direction
    from deltasam.step.norms import global_norm
    from deltasam.step.randomness import Seed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 30))
    own = torch.cat([r.flatten() for r in random_direction(list(model.parameters()), Seed(3, 1))])
    others = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(others, own)
    found = {"replicated differ": float(any(not torch.equal(own, other) for other in others))}
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    r = random_direction(list(model.parameters()), Seed(3, 1))
    full = torch.cat([part.full_tensor().flatten() for part in r])
    found |= {"mean": float(full.mean()), "std": float(full.std()), "distinct": len(full.unique()) / len(full)}
    found["norm"] = abs(float(global_norm(r)) / float(full.norm()) - 1)
    return found


class Holder(nn.Module):
    """A model with a replicated part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


def refusals(rank: int, world: int) -> dict[str, str]:
    """The messages of refusals."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    batch = part_of(whole_batch(world), rank)

    def message(method: Method, model: nn.Module) -> str:
        try:
            method.backward(model, batch, cross_entropy)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    found = {"local": message(GSAM(), sharded(model_for(0.0)))}
    found["shards"] = message(DeltaSAM(weighting=Directional(), scope="global"), sharded(model_for(0.0)))
    split = model_for(0.0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    split.feed.weight = nn.Parameter(distribute_tensor(split.feed.weight.data, mesh, [Shard(0)]))
    found["tensor-parallel"] = message(SAM(), split)
    found["fsdp1"] = message(
        SAM(), FullyShardedDataParallel(model_for(0.0), device_id=torch.device("cpu"), use_orig_params=True)
    )
    found["part"] = message(SAM(), Holder(DistributedDataParallel(model_for(0.0))))
    found["composable"] = message(SAM(), Holder(replicate(model_for(0.0))))
    whole = model_for(0.0)
    fully_shard(whole, mesh=mesh, ignored_params={whole.feed.weight})
    found["unsharded"] = message(SAM(scope="global"), whole)
    found["unsharded local"] = message(SAM(), whole)
    found["unsharded kept"] = message(SAM(scope="global", params=lambda name, p: name != "feed.weight"), whole)
    engine = type("DeepSpeedEngine", (TinyTransformer,), {"__module__": "deepspeed.runtime.engine"})
    found["deepspeed"] = message(SAM(), engine().double())
    return found


CASES: Any = (replicas, accumulation, held_back, routed, buffers, closures, compiled)
CASES += (inside, unwrapped, uneven, communication, decisions, frozen_replicas)
if CAN_SHARD:
    CASES += (frozen_shards, shards, gathered, blocks, looped, parts, kept, directions, refusals)


def process(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # They meet in a file: a port that is free now may be taken when the first of them listens there.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    found = {case.__name__: case(rank, world) for case in CASES}
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(folder: Path, world: int) -> None:
    context = torch.multiprocessing.get_context("fork")
    started = [context.Process(target=process, args=(r, world, folder)) for r in range(world)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    if any(one.exitcode for one in started):
        sys.exit(1)


if __name__ == "__main__":
    for number in sys.argv[2:]:
        launch(Path(sys.argv[1]), int(number))
