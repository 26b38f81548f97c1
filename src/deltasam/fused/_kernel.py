"""The Triton kernel behind :mod:`deltasam.fused`. Imported there, on machines that have Triton (torch brings it)."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["number"])
def move_kernel(table, step, number, MOST: tl.constexpr, BLOCK: tl.constexpr):
    # Which tensor is this block of? The one whose last block (exclusive) is the first after it.
    block = tl.program_id(0)
    each = tl.arange(0, MOST)
    ends = tl.load(table + each, mask=each < number, other=0)
    mine = tl.sum(((ends <= block) & (each < number)).to(tl.int32), 0)
    begin = tl.load(table + number + mine)
    size = tl.multiple_of(tl.load(table + 2 * number + mine), 4)
    weight = tl.multiple_of(tl.load(table + 3 * number + mine).to(tl.pointer_type(tl.float32)), 16)
    direction = tl.multiple_of(tl.load(table + 4 * number + mine).to(tl.pointer_type(tl.float32)), 16)
    out = tl.multiple_of(tl.load(table + 5 * number + mine).to(tl.pointer_type(tl.float32)), 16)

    at = (block - begin) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + at, mask=inside)
    d = tl.load(direction + at, mask=inside)
    s = tl.load(step)
    tl.store(out + at, tl.where(s == 0, w, w + s * d), mask=inside)
