"""Where the time of a captured step goes: the kernels of one replay, by kind and one by one.

    PYTHONPATH=src python benchmarks/profile_step.py --model bert-base --size 16x64 --precision bf16

Needs a CUDA device. Times are device times of torch.profiler. Their sum is larger than the time of the step if
branches of the graph run in parallel, and smaller if kernels wait for each other.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence

# The first word that occurs in the name of a kernel decides.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("fmha", "flash", "attention", "cudnn_generated")),
    ("products", ("gemm", "nvjet", "cublas", "splitk", "cutlass", "_mm_", "dot_kernel")),
    ("optimizer and moves", ("multi_tensor", "fused_adam", "fused_sgd", "move_kernel")),
    ("compiled", ("triton",)),
    ("norms", ("layer_norm", "LayerNorm")),
    ("embeddings", ("embedding", "index")),
    ("copies and casts", ("copy", "Memcpy", "Memset", "memcpy", "memset")),
    ("reductions", ("reduce",)),
    ("random numbers", ("distribution", "dropout", "philox")),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, from its name."""
    for kind, words in KINDS:
        if any(word in kernel for word in words):
            return kind
    return "others (mostly elementwise)"


def profile(work: Callable[[], None], repeats: int) -> dict[str, tuple[int, float]]:
    """Calls and microseconds of every kernel in a step."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in found.key_averages():
        if event.self_device_time_total > 0:
            kernels[event.key] = (round(event.count / repeats), event.self_device_time_total / repeats)
    return kernels


def seconds_per_step(work: Callable[[], None], repeats: int) -> float:
    """Time of a step in a long sequence of steps."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def show(name: str, kernels: dict[str, tuple[int, float]], seconds: float, top: int) -> None:
    """Prints two tables."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel, (count, micros) in kernels.items():
        kinds[kind_of(kernel)][0] += count
        kinds[kind_of(kernel)][1] += micros
    number, total = (sum(column) for column in zip(*kernels.values(), strict=True))
    print(f"== {name}: {seconds * 1e3:.2f} ms a step, {total / 1e3:.2f} ms in {number} kernels")
    for kind, (count, micros) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        print(f"  {micros / 1e3:7.3f} ms  {count:5.0f} x  {kind}")
    for kernel, (count, micros) in sorted(kernels.items(), key=lambda item: -item[1][1])[:top]:
        print(f"    {micros / 1e3:7.3f} ms  {count:5d} x {micros / max(1, count):7.1f} us  {kernel[:130]}")


def main(argv: Sequence[str] | None = None) -> None:
    """Profiles the given methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--size", default="16x64", metavar="NxT")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--methods", nargs="*", default=["sam"])
    parser.add_argument("--ways", nargs="*", default=["captured", "compiled+captured"])
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile: default or tuned")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--top", type=int, default=12, help="number of kernels to list")
    options = parser.parse_args(argv)

    from deltasam.lab.bench import candidates, prepared
    from deltasam.lab.bench.options import StepOptions

    batch, length = map(int, options.size.split("x"))
    shape = StepOptions(
        model=options.model, batch=batch, length=length, precision=options.precision, device="cuda",
        compile_mode=options.compile_mode,
    )  # fmt: skip
    every = candidates(tuple(options.methods), ways=tuple(options.ways), third_party=False, embeddings=True)
    names = {name.lower().replace("-", "") for name in options.methods}
    wanted = [one for one in every if one.way != "eager" and one.method.lower().replace("-", "") in names]
    for entry, work in prepared(shape, wanted):
        seconds = seconds_per_step(work, 4 * options.repeats)
        name = f"{entry.name}, {options.model} {options.size} {options.precision}"
        show(name, profile(work, options.repeats), seconds, options.top)


if __name__ == "__main__":
    main()
