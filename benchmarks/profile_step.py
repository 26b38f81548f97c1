"""Where the time of a captured step goes: the kernels of one replay, by kind and one by one.

    PYTHONPATH=src python benchmarks/profile_step.py --model bert-base --size 16x64 --precision bf16

Needs a CUDA device. Times are device times of torch.profiler. Their sum is larger than the time of the step if
branches of the graph run in parallel, and smaller if kernels wait for each other.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence

# The first kind with a part of the name of the kernel.
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
    found = (kind for kind, parts in KINDS if any(part in kernel for part in parts))
    return next(found, "others (mostly elementwise)")


def show(name: str, work: Callable[[], None], repeats: int, top: int) -> None:
    """Profiles a step, and prints its time, its kinds of kernels, and its slowest kernels."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.utils.benchmark import Timer

    seconds = Timer("work()", globals={"work": work}).timeit(4 * repeats).mean
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    kernels = [
        (event.self_device_time_total / repeats / 1e3, round(event.count / repeats), event.key)
        for event in profile.key_averages() if event.self_device_time_total > 0
    ]  # fmt: skip
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for taken, count, kernel in kernels:
        kinds[kind_of(kernel)][0] += taken
        kinds[kind_of(kernel)][1] += count
    total, number = (sum(each[column] for each in kernels) for column in (0, 1))
    print(f"== {name}: {seconds * 1e3:.2f} ms a step, {total:.2f} ms in {number} kernels")
    for kind, (taken, count) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        print(f"  {taken:7.3f} ms  {count:5.0f} x  {kind}")
    for taken, count, kernel in sorted(kernels, reverse=True)[:top]:
        print(f"    {taken:7.3f} ms  {count:5d} x {taken / max(1, count) * 1e3:7.1f} us  {kernel[:130]}")


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
        name = f"{entry.name}, {options.model} {options.size} {options.precision}"
        show(name, work, options.repeats, options.top)


if __name__ == "__main__":
    main()
