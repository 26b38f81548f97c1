"""The parts of ``speed.py``: which steps are measured, on which shapes, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

MODELS = ("bert-base", "roberta-large")
SIZES = ("16x64", "32x128")
PRECISIONS = ("bf16", "tf32")
AMBIENT, INSTANCE, EXACT = "delta-sam-ambient", "per-instance-sam", "per-instance-sam-exact"
LOOP = (INSTANCE, "per-instance-sam-loop")
GROWTH = [  # the longest and the largest first: if time runs out, they are measured
    *(("bert-base", f"16x{t}") for t in (1024, 512)),
    ("bert-1b", "16x64"),
    *(("bert-base", size) for size in ("16x64", "16x256", "16x128", "128x64", "32x64", "8x64")),
    *((model, "16x64") for model in ("roberta-large", "bert-8x512", "bert-4x256")),
    *(("bert-base", size) for size in ("64x64", "16x32")),
    *((model, "16x64") for model in ("bert-4x512", "bert-2x128")),
]


@dataclass(frozen=True)
class BenchRequest:
    """The options of the command line; None means the default of the part."""

    models: Sequence[str] | None = None
    sizes: Sequence[str] | None = None
    precisions: Sequence[str] | None = None
    device: str = "cuda"
    rounds: int | None = None
    compile_mode: str = "tuned"

    def grid(self, models: Sequence[str] = MODELS[:1], sizes: Sequence[str] = SIZES) -> Iterator[tuple[str, str]]:
        """Models and sizes, small sizes first."""
        return product(self.models or models, self.sizes or sizes)

    def plan(self, shapes: Any, *, rounds: int, seconds: float | None = None, **settings: Any) -> Iterator[Any]:
        """Options of the measurements; another number of rounds leaves the time of a round as it is."""
        from deltasam.lab.bench.options import StepOptions

        chosen = self.rounds or rounds
        total = None if seconds is None else seconds * chosen / rounds
        usual = settings.pop("precisions", PRECISIONS)
        for (model, size), precision in product(shapes, self.precisions or usual):
            batch, length = map(int, size.split("x"))
            yield StepOptions(
                device=self.device, third_party=False, rounds=chosen, seconds=total, model=model, batch=batch,
                length=length, precision=precision, **settings,
            )  # fmt: skip

    def larger(self, shape: tuple[str, str]) -> bool:
        """Whether the shape has the largest size, where memory is measured."""
        return shape[1] == (self.sizes or SIZES)[-1]


def eager(request: BenchRequest) -> Iterator[Any]:
    """Eager steps; many rounds, because the host adds noise."""
    for shape in request.grid():
        yield from request.plan(
            [shape], methods=(INSTANCE, AMBIENT), ways=("eager",), rounds=11, seconds=2.2, warmup=1,
            memory=request.larger(shape),
        )  # fmt: skip


def figures(request: BenchRequest) -> Iterator[Any]:
    """Captured steps of every method, with eager plain training and SAM; memory at the larger size."""
    for shape, precision in product(request.grid(), request.precisions or PRECISIONS):
        methods = (INSTANCE, AMBIENT, "delta-sam", "delta-sam-every-4", *([EXACT] if precision == "tf32" else []))
        yield from replace(request, precisions=[precision]).plan(
            [shape], methods=methods, ways=("captured",), rounds=5, seconds=0.5, warmup=1,
            memory=request.larger(shape),
        )  # fmt: skip


def compiled(request: BenchRequest) -> Iterator[Any]:
    """Compiled steps, captured or not; each measurement compiles the model again."""
    return request.plan(
        request.grid(), methods=(INSTANCE, AMBIENT), ways=("captured", "compiled", "compiled+captured"), rounds=6,
        seconds=0.9, warmup=1, memory=False, compile_mode=request.compile_mode,
    )  # fmt: skip


def long(request: BenchRequest) -> Iterator[Any]:
    """Long texts: as many tokens as 32 x 128, in fewer instances."""
    return request.plan(
        request.grid(sizes=("8x512", "4x1024")), methods=(INSTANCE,), ways=("eager", "captured"), rounds=5,
        seconds=0.5, warmup=1, memory=True,
    )  # fmt: skip


def peers(request: BenchRequest) -> Iterator[Any]:
    """SAM of other packages and ours, eager and captured."""
    return request.plan(
        request.grid(), precisions=PRECISIONS[:1], methods=("sam",), ways=("captured",), rounds=9, seconds=1.8,
        warmup=1, memory=False,
    )  # fmt: skip


def relatives(request: BenchRequest) -> Iterator[Any]:
    """Methods that do not take the same operations in every step, eager and captured."""
    return request.plan(
        request.grid(sizes=SIZES[:1]), precisions=PRECISIONS[:1], methods=("look-sam", "esam", "fisher-sam"),
        ways=("eager", "captured"), rounds=4, seconds=0.4, warmup=1, memory=False,
    )  # fmt: skip


def accumulation(request: BenchRequest) -> Iterator[Any]:
    """Four micro-batches in one step, relative to four steps."""
    return request.plan(
        request.grid(sizes=SIZES[:1]), precisions=PRECISIONS[:1], methods=(INSTANCE,), ways=("eager", "captured"),
        accumulate=4, rounds=4, seconds=0.4, warmup=1, memory=False,
    )  # fmt: skip


def growth(request: BenchRequest) -> Iterator[Any]:
    """Over the number of instances, the number of tokens, and the size of the model."""
    wanted = [
        (model, size) for model, size in GROWTH
        if model in (request.models or [model]) and size in (request.sizes or [size])
    ]  # fmt: skip
    return request.plan(
        wanted, precisions=PRECISIONS[:1], methods=(INSTANCE, AMBIENT), ways=("eager", "captured"), rounds=3,
        seconds=0.3, warmup=0, memory=True,
    )  # fmt: skip


def loop(request: BenchRequest) -> Iterator[Any]:
    """Per-instance SAM one instance after the other, as in the paper; the low-rank engine; SAM."""
    return request.plan(
        request.grid(), methods=LOOP, ways=("eager", "captured"), rounds=3, seconds=0.4, warmup=0, memory=False
    )


def cpu(request: BenchRequest) -> Iterator[Any]:
    """Exact per-instance perturbation on a CPU, with the engine and one instance after the other."""
    shapes = (("bert-4x256", "16x64"), ("bert-2x768", "8x128"), ("bert-2x768", "16x64"))
    return request.plan(shapes, precisions=["fp32"], methods=LOOP, rounds=5, warmup=1, memory=False)


def mlp(request: BenchRequest) -> Iterator[Any]:
    """SAM of other packages and ours on a small network on a CPU, where the overhead of a step is visible."""
    return request.plan(
        [("mlp", "16x1")], precisions=["fp32"], methods=("sam",), rounds=41, seconds=4.1, warmup=2, memory=False,
        clock="cpu", threads=1,
    )  # fmt: skip


def adamw(request: BenchRequest) -> Iterator[Any]:
    """The implementations of AdamW on a CPU; processor time is less sensitive to other work on the machine."""
    return request.plan(
        request.grid(["bert-4x256"], ["4x32", "16x64"]), precisions=["fp32"], methods=("sam",),
        adamw=("fused", "foreach", "for-loop"), rounds=9, warmup=0, memory=False, clock="cpu", threads=1,
    )  # fmt: skip


PARTS: dict[str, Callable[[BenchRequest], Iterator[Any]]] = {
    each.__name__: each
    for each in (
        eager, figures, compiled, long, peers, relatives, accumulation, growth, loop, cpu, mlp, adamw,
    )
}  # fmt: skip
DEFAULT = ("eager", "figures", "compiled", "long", "peers", "relatives", "accumulation", "growth")
"""The parts for a GPU that the page needs, the most important first."""
LEFT_OUT: dict[str, Callable[[Any], bool]] = {
    # The loop is long enough already.
    "loop": lambda each: each.method == "PerInstanceSAM-loop" and each.way != "eager",
    "compiled": lambda each: each.way == "captured" and each.method != "SAM",
    # Fewer steps, so that more shapes can be measured.
    "growth": lambda each: each.name == "DeltaSAM-ambient",
}
"""Part -> the candidates of its options that are not measured."""


def candidates_of(part: str, options: Any) -> list[Any] | None:
    """The candidates, if they are not those of the options."""
    from deltasam.lab.bench import candidates

    embeddings = options.model != "mlp"
    if part in ("peers", "mlp"):
        from speed_peers import PEERS

        ours = candidates(options.methods, ways=options.ways, third_party=False, embeddings=embeddings)
        return [*(each for each in ours if each.name != "ERM captured"), *PEERS]
    if part not in LEFT_OUT:
        return None
    found = candidates(options.methods, ways=options.ways, third_party=False, embeddings=embeddings)
    kept = [each for each in found if not LEFT_OUT[part](each)]
    if part == "compiled":
        from speed_peers import BY_HAND

        kept.append(BY_HAND)
    return kept
