"""The Triton kernel of :mod:`deltasam.step.fused`, which imports it if Triton is installed (it comes with torch)."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _rounded(w, move, random, grid):
    """``deltasam.step.rounding.add_rounded``, with the same codes of grids as the table: 1 bf16, 2 fp16, 3 tf32."""
    bits = w.to(tl.int32, bitcast=True)
    bf16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    fp16 = w.to(tl.float16).to(tl.float32)
    tf32 = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    target = tl.where(grid == 1, bf16, tl.where(grid == 2, fp16, tf32)) + move

    random = random.to(tl.int32, bitcast=True)
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
            value = _rounded(w, s * d, tl.randint(tl.load(seed) + mine, at), grid)
    tl.store(out + at, tl.where(s == 0, w, value).to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["number"])
def mirrored_move_kernel(
    table, step, seed, number, DTYPE: tl.constexpr, ROUND: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
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
    w = tl.load(weight + at, mask=inside)
    d = tl.load(direction + at, mask=inside)
    s = tl.load(step)
    moved = tl.where(s == 0, w, w + s * d)
    tl.store(out + at, moved, mask=inside)
    tl.store(direction + at, w + (w - moved), mask=inside)  # the other side of w, in the memory of the direction


@triton.jit
def _add_noise(
    weight,
    scale,
    out,
    at,
    size,
    columns,
    by_column,
    normal,
    random,
    step,
    grid,
    DTYPE: tl.constexpr,
    ROUND: tl.constexpr,
):
    inside = at < size
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    row = at // columns
    move = step * tl.load(scale + tl.where(by_column, at - row * columns, row), mask=inside) * normal
    value = w + move
    if ROUND:  # noqa: SIM102 - decided when the kernel is compiled
        if grid != 0:
            value = _rounded(w, move, random, grid)
    tl.store(out + at, tl.where(step == 0, w, value).to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["number"])
def noise_kernel(
    table, step, seed, number, DTYPE: tl.constexpr, ROUND: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    each = tl.arange(0, MOST)
    ends = tl.load(table + each, mask=each < number, other=0)
    mine = tl.sum(((ends <= block) & (each < number)).to(tl.int32), 0)
    begin = tl.load(table + number + mine)
    size = tl.multiple_of(tl.load(table + 2 * number + mine).to(tl.int32), 4)
    weight = tl.multiple_of(tl.load(table + 3 * number + mine).to(tl.pointer_type(DTYPE)), 16)
    scale = tl.load(table + 4 * number + mine).to(tl.pointer_type(tl.float32))
    out = tl.multiple_of(tl.load(table + 5 * number + mine).to(tl.pointer_type(DTYPE)), 16)
    grid = tl.load(table + 6 * number + mine).to(tl.int32)
    columns = tl.load(table + 7 * number + mine).to(tl.int32)
    by_column = tl.load(table + 8 * number + mine) != 0

    # A call of the generator gives four numbers: one for each quarter of the block. Each tensor has its own streams.
    quarter: tl.constexpr = BLOCK // 4
    own = (block - begin).to(tl.int32)
    lanes = own * quarter + tl.arange(0, quarter)
    stream = tl.load(seed) + 2 * mine
    n0, n1, n2, n3 = tl.randn4x(stream, lanes)
    r0, r1, r2, r3 = tl.randint4x(stream + 1, lanes)  # dead code unless a grid is rounded to
    s = tl.load(step)
    at = own * BLOCK + tl.arange(0, quarter)
    _add_noise(weight, scale, out, at, size, columns, by_column, n0, r0, s, grid, DTYPE, ROUND)
    _add_noise(weight, scale, out, at + quarter, size, columns, by_column, n1, r1, s, grid, DTYPE, ROUND)
    _add_noise(weight, scale, out, at + 2 * quarter, size, columns, by_column, n2, r2, s, grid, DTYPE, ROUND)
    _add_noise(weight, scale, out, at + 3 * quarter, size, columns, by_column, n3, r3, s, grid, DTYPE, ROUND)


@triton.jit
def own_kernel(shared, moves, c, out, size, row, BF16: tl.constexpr, BLOCK: tl.constexpr):
    """``deltasam.step.fused.instances.by_torch``; one row of blocks per group."""
    group = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(moves + group.to(tl.int64) * row + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(c + group)

    hashed = at * 0x1E3779B1 + group * 0x27D4EB2F + d.to(tl.int32, bitcast=True) * 0x05EBCA6B
    hashed = ((hashed ^ (hashed >> 15)) * 0x2C1B3C6D) >> 9
    bits = w.to(tl.int32, bitcast=True)
    if BF16:
        start = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        target = (start + s * d).to(tl.int32, bitcast=True) + (hashed & 0xFFFF)
        value = (target & -0x10000).to(tl.float32, bitcast=True)
    else:
        start = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        target = (start + s * d).to(tl.int32, bitcast=True) + (hashed & 0x1FFF)
        value = (target & -0x2000).to(tl.float32, bitcast=True)
    value = tl.where(s == 0, start, value)
    tl.store(out + group.to(tl.int64) * size + at, value.to(out.dtype.element_ty), mask=inside)
