"""The Triton kernel of :mod:`deltasam.step.fused`, which imports it if Triton is installed (it comes with torch)."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _rounded(w, move, seed, at, grid):
    """``deltasam.step.rounding.add_rounded``, with the same codes of grids as the table: 1 bf16, 2 fp16, 3 tf32."""
    bits = w.to(tl.int32, bitcast=True)
    bf16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    fp16 = w.to(tl.float16).to(tl.float32)
    tf32 = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    target = tl.where(grid == 1, bf16, tl.where(grid == 2, fp16, tf32)) + move

    random = tl.randint(seed, at).to(tl.int32, bitcast=True)
    cut = tl.where(grid == 1, 0xFFFF, 0x1FFF)
    rounded = ((target.to(tl.int32, bitcast=True) + (random & cut)) & ~cut).to(tl.float32, bitcast=True)
    share = (random & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24, also the spacing of small float16
    small = tl.floor(target * 16777216.0 + share) * 5.9604644775390625e-08
    rounded = tl.where((grid == 2) & (tl.abs(target) < 6.103515625e-05), small, rounded)
    return tl.where(move == 0, w, rounded)


@triton.jit(do_not_specialize=["number"])
def move_kernel(
    table, step, seed, number, DTYPE: tl.constexpr, ROUND: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    # The tensor of this block is the first one whose last block (exclusive) comes after it.
    block = tl.program_id(0)
    each = tl.arange(0, MOST)
    ends = tl.load(table + each, mask=each < number, other=0)
    mine = tl.sum(((ends <= block) & (each < number)).to(tl.int32), 0)
    begin = tl.load(table + number + mine)
    size = tl.multiple_of(tl.load(table + 2 * number + mine), 4)
    weight = tl.multiple_of(tl.load(table + 3 * number + mine).to(tl.pointer_type(DTYPE)), 16)
    direction = tl.multiple_of(tl.load(table + 4 * number + mine).to(tl.pointer_type(DTYPE)), 16)
    out = tl.multiple_of(tl.load(table + 5 * number + mine).to(tl.pointer_type(DTYPE)), 16)

    at = (block - begin) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    d = tl.load(direction + at, mask=inside).to(tl.float32)
    s = tl.load(step)
    value = w + s * d
    if ROUND:
        grid = tl.load(table + 6 * number + mine).to(tl.int32)
        if grid != 0:
            # One random stream per tensor, indexed by the position in the tensor.
            value = _rounded(w, s * d, tl.load(seed) + mine, at, grid)
    tl.store(out + at, tl.where(s == 0, w, value).to(DTYPE), mask=inside)
